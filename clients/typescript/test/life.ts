/**
 * The agent of tests/system/test_languages.py: `node life.js ADDRESS ATTEMPTS`. The task's metadata names what it does with an
 * attempt. tests/support/life.py and clients/go/internal/life make exactly the same calls.
 */

import { type Agent, Failed, type Message, type Outcome, connect } from "@penstock/client";

const agents: Record<string, Agent> = {
  async text({ trajectory }) {
    const first = await trajectory.turn(undefined, { maxTokens: 12 });
    const second = await trajectory.turn(` and ${first.text.length} more`, { maxTokens: 8, temperature: 0.5 });
    return { reward: (first.text.length + second.text.length) / 8, turnRewards: [0.25, 0.75] };
  },

  async conversation({ trajectory }) {
    const tools = [{ name: "add", description: "Adds.", parameters: { type: "object", required: ["a", "b"] } }];
    await trajectory.turn([{ role: "user", content: "What is 2 + 3?" }], { maxTokens: 10, tools });
    await trajectory.turn({ role: "tool", content: '{"sum": 5}', toolCallId: "call-1" });
    await trajectory.turn("Is that so?");
    return judged(trajectory.turns.length);
  },

  async chat({ trajectory }) {
    const asked: Message[] = [
      { role: "system", content: "Be brief." },
      { role: "user", content: "What is 2 + 3?" },
    ];
    await trajectory.turn(asked, { maxTokens: 10 });
    await trajectory.turn("Is that so?");
    return judged(trajectory.turns.length);
  },

  async aborted({ trajectory }) {
    // A worker's trajectories resume automatically; here the agent resumes them.
    trajectory.resumeAborted = false;
    for await (const segment of trajectory.stream(undefined, { maxTokens: 24, flushMs: 1 })) {
      if (segment.position === 0) await trajectory.abort("the test asks for it");
    }
    if (!trajectory.turns.at(-1)!.aborted) throw new Failed("NOT_ABORTED");
    const turn = await trajectory.resume();
    return judged(turn.segments.length);
  },

  async malformed({ trajectory }) {
    const tools = [{ name: "add", description: "Adds.", parameters: { type: "object" } }];
    const turn = await trajectory.turn([{ role: "user", content: "Add." }], { maxTokens: 4, tools });
    throw new Failed("TOOL_CALL", turn.toolCallError);
  },

  async lost({ trajectory }) {
    await trajectory.turn(undefined, { maxTokens: 24 });
    return trajectory.turns.length;
  },

  async failure({ trajectory }) {
    await trajectory.turn(undefined, { maxTokens: 4 });
    throw new Failed("TOOL_TIMEOUT", "the sandbox was silent");
  },
};

function judged(count: number): Outcome {
  return {
    reward: count / 4,
    metrics: { turns: count, half: 0.5 },
    metadata: { note: "é", list: [1, true, null, "two"], nested: { deep: { number: 1.5 } } },
  };
}

const [address = "", attempts = "0"] = process.argv.slice(2);
const penstock = connect(address);
const statistics = await penstock.worker({ concurrency: 1, attempts: Number(attempts) }, (attempt) =>
  agents[attempt.task.metadata.agent]!(attempt),
);
console.log(JSON.stringify(statistics));
penstock.close();
