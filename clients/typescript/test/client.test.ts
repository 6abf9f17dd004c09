/**
 * Tests of the client against a server that tests/system/test_client_packages.py starts: PENSTOCK_TEST_ADDRESS and, with TLS
 * and tokens, PENSTOCK_TEST_SECURE_ADDRESS, PENSTOCK_TEST_CA, PENSTOCK_TEST_TOKEN_FILE. Its leases last one second,
 * and each token takes a few milliseconds.
 */

import assert from "node:assert/strict";
import { getEventListeners } from "node:events";
import { after, test } from "node:test";
import { setTimeout as sleep } from "node:timers/promises";
import {
  AccessDenied,
  type Agent,
  type Closed,
  CredentialsUnusable,
  Failed,
  InvalidRequest,
  NotAllowedNow,
  NotFound,
  type Outcome,
  Overloaded,
  ServerUnavailable,
  type WorkerOptions,
  connect,
  tokensOf,
} from "@penstock/client";

const environment = (name: string): string => {
  const value = process.env[`PENSTOCK_TEST_${name}`];
  assert.ok(value, `PENSTOCK_TEST_${name} is not set: run \`make clients\``);
  return value;
};
const client = connect(environment("ADDRESS"));
after(() => client.close());
let taskCount = 0;

/** Runs an agent on one task; returns the outcome that the server got. Closes leftovers of earlier workers. */
async function outcomeOf(agent: Agent, options: WorkerOptions = {}): Promise<Outcome | Failed | undefined> {
  const taskId = `typescript-${taskCount++}`;
  await client.submitTasks([{ taskId, prompt: "A task.", sampling: { maxTokens: 4 } }]);
  const done = new AbortController();
  const signal = options.signal ? AbortSignal.any([options.signal, done.signal]) : done.signal;
  let told: Outcome | Failed | undefined;
  const onAttempt: WorkerOptions["onAttempt"] = ({ task }, outcome) => {
    if (task.taskId !== taskId || outcome === undefined) return;
    told ??= outcome;
    done.abort();
  };
  await client.worker({ concurrency: 1, ...options, signal, onAttempt }, (attempt) =>
    attempt.task.taskId === taskId && told === undefined ? agent(attempt) : 0,
  );
  return told;
}

test("a refusal says which, of what, and how", async () => {
  await assert.rejects(client.trajectory("nobody").get(), (error) => {
    assert.ok(error instanceof NotFound);
    assert.equal(error.reason, "TRAJECTORY_UNKNOWN");
    assert.equal(error.metadata.trajectory_id, "nobody");
    return true;
  });
});

test("a request that is wrong leaves nothing behind", async () => {
  const trajectory = client.trajectory();
  await assert.rejects(trajectory.turn("x".repeat(600)), (error) => {
    assert.ok(error instanceof InvalidRequest);
    assert.equal(error.reason, "PROMPT_TOO_LONG");
    return true;
  });
  const turn = await trajectory.turn("x", { maxTokens: 3, ignoreEos: true });
  assert.equal(turn.index, 0);
  assert.equal(tokensOf(turn.segments).length, 3);
});

test("tokens come as they are sampled, in arrays of their own types", async () => {
  const trajectory = client.trajectory();
  const prompt = Int32Array.of(1, 2, 299);
  let position = 0;
  for await (const segment of trajectory.stream(prompt, { maxTokens: 40, ignoreEos: true, flushMs: 1, seed: 2n ** 62n })) {
    assert.ok(segment.tokenIds instanceof Int32Array && segment.logprobs instanceof Float32Array);
    assert.equal(segment.position, position);
    assert.equal(segment.weightVersion, 0n);
    position += segment.tokenIds.length;
  }
  assert.equal(position, 40);
  const held = await trajectory.get();
  assert.deepEqual(held.segments[0]!.tokenIds, prompt);
  assert.deepEqual(tokensOf(held.segments.slice(1)), tokensOf(trajectory.turns[0]!.segments));
  assert.equal(held.finishReason, "length");
});

test("a turn that was cancelled goes on at the exact token", async () => {
  const trajectory = client.trajectory();
  const cancelled = new AbortController();
  const reason = new Error("enough");
  const reading = async () => {
    for await (const _ of trajectory.stream("x", { maxTokens: 200, ignoreEos: true, flushMs: 1, signal: cancelled.signal })) {
      cancelled.abort(reason);
    }
  };
  await assert.rejects(reading, reason);
  await assert.rejects(trajectory.turn("y"), /not finished/);
  const turn = await trajectory.resume();
  assert.equal(tokensOf(turn.segments).length, 200);
  assert.equal(turn.segments.length, 1);
  const whole = await client.trajectory().turn("x", { maxTokens: 200, ignoreEos: true });
  assert.deepEqual(turn.segments[0]!.tokenIds, whole.segments[0]!.tokenIds);
});

test("a lease is kept while its agent works without the server", async () => {
  const told = await outcomeOf(async ({ trajectory, signal }) => {
    await trajectory.turn();
    await sleep(2500);
    assert.equal(signal.aborted, false);
    return 0.5;
  });
  assert.deepEqual(told, { reward: 0.5 });
});

test("an attempt is its agent's own to close", async () => {
  const told = await outcomeOf(async ({ trajectory }) => {
    await trajectory.turn();
    await trajectory.complete({ reward: 0.25, metrics: { own: 1 } });
    return 1;
  });
  assert.equal((told as Outcome).reward, 0.25);
});

test("what an agent throws is its attempt's failure", async () => {
  class ToolBroke extends Error {
    override name = "ToolBroke";
  }
  const failures: [Agent, string][] = [
    [() => Promise.reject(new ToolBroke("it did")), "TOOL_BROKE"],
    [() => Promise.reject(new Failed("NO_SANDBOX", "none")), "NO_SANDBOX"],
    [() => NaN, "RANGE_ERROR"],
    [() => ({ reward: 1, metadata: { big: 1n } }), "TYPE_ERROR"],
    [({ trajectory }) => trajectory.turn("x".repeat(600)).then(() => 1), "PROMPT_TOO_LONG"],
  ];
  for (const [agent, reason] of failures) {
    const told = await outcomeOf(agent);
    assert.ok(told instanceof Failed, reason);
    assert.equal(told.reason, reason);
  }
});

test("a failure is told in as many characters as a server takes, all of them UTF-8", async () => {
  const trajectory = client.trajectory();
  await trajectory.turn("x", { maxTokens: 2 });
  await trajectory.fail("R".repeat(300), "cut \ud83d");
  const { outcome } = await trajectory.get();
  assert.ok(outcome instanceof Failed);
  assert.deepEqual([outcome.reason, outcome.message], ["R".repeat(256), "cut \ufffd"]);
});

test("what is larger than a message may be is not sent again and again", async () => {
  const begun = performance.now();
  const large = client.submitTasks([{ taskId: "large", prompt: "x".repeat(68e6) }]);
  await assert.rejects(large, (error) => error instanceof Overloaded && error.retryAfterMs === undefined);
  assert.ok(performance.now() - begun < 10_000);
});

test("a worker that goes on for long listens to its signal once", async () => {
  const attempts = 8;
  await client.submitTasks(
    Array.from({ length: attempts }, (_, i) => ({ taskId: `listens-${i}`, prompt: "x", sampling: { maxTokens: 1 } })),
  );
  const { signal } = new AbortController();
  const counts: number[] = [];
  const onAttempt = () => counts.push(getEventListeners(signal, "abort").length);
  await client.worker({ concurrency: 2, attempts, signal, onAttempt }, () => 1);
  assert.deepEqual(counts, Array(attempts).fill(1));
  assert.equal(getEventListeners(signal, "abort").length, 0);
});

test("an attempt has its time", async () => {
  const agent: Agent = ({ trajectory }) => trajectory.turn(undefined, { maxTokens: 400, ignoreEos: true }).then(() => 1);
  const told = await outcomeOf(agent, { attemptMs: 300 });
  assert.equal((told as Failed).reason, "ATTEMPT_TIMEOUT");
});

test("the server's limit is the lease's, also for an agent that reacts to nothing", async () => {
  let left = 0;
  const agent: Agent = ({ endsAt }) => {
    left = endsAt - Date.now();
    return new Promise<number>(() => undefined);
  };
  const told = await outcomeOf(agent, { attemptMs: 300 });
  assert.equal((told as Failed).reason, "ATTEMPT_TIMEOUT");
  assert.ok(left > 3_500_000 && left <= 3_600_000, `${left}`);
});

test("a worker that is stopped gives back what runs", async () => {
  const stopping = new AbortController();
  const agent: Agent = async () => {
    stopping.abort();
    await new Promise(() => undefined);
    return 1;
  };
  const told = await outcomeOf(agent, { signal: stopping.signal, drainMs: 50 });
  assert.equal((told as Failed).reason, "WORKER_STOPPED");
});

test("a close ends a turn that would resume by itself", async () => {
  const trajectory = client.trajectory(undefined, { resumeAborted: true });
  const turn = trajectory.turn("x", { maxTokens: 400, ignoreEos: true });
  await sleep(100);
  const { calls } = trajectory as unknown as { calls: { completeTrajectory: (request: unknown) => Promise<Closed> } };
  const complete = calls.completeTrajectory.bind(calls);
  let answers = 0;
  calls.completeTrajectory = async (request) => {
    // Longer than it takes to resume a turn.
    await sleep(200);
    answers++;
    return complete(request);
  };
  try {
    await trajectory.complete(1);
  } finally {
    calls.completeTrajectory = complete;
  }
  assert.ok((await turn).aborted);
  assert.equal(answers, 1);
});

test("a close aborts a turn of which it does not know", async () => {
  const trajectory = client.trajectory();
  const turn = trajectory.turn("x", { maxTokens: 400, ignoreEos: true });
  await sleep(100);
  await client.trajectory(trajectory.trajectoryId).complete(1);
  assert.ok((await turn).aborted);
});

test("a closed trajectory is refused as one", async () => {
  const trajectory = client.trajectory();
  await trajectory.turn("x", { maxTokens: 2 });
  await trajectory.complete(1);
  await assert.rejects(trajectory.turn("y"), (error) => error instanceof NotAllowedNow && error.reason === "TRAJECTORY_CLOSED");
});

test("a server that is not there is unavailable", async () => {
  const nobody = connect("127.0.0.1:1", { patience: { callMs: 500 } });
  await assert.rejects(nobody.serverInfo(), (error) => error instanceof ServerUnavailable || /deadline/i.test(String(error)));
  nobody.close();
});

test("who calls is shown over TLS, and to nobody in plaintext", async () => {
  const address = environment("SECURE_ADDRESS");
  const tls = { ca: environment("CA") };
  const stranger = connect(address, { tls });
  await assert.rejects(stranger.serverInfo(), (error) => error instanceof AccessDenied && error.reason === "TOKEN_MISSING");
  stranger.close();
  const agent = connect(address, { tls, tokenFile: environment("TOKEN_FILE") });
  assert.equal((await agent.serverInfo()).vocabSize, 300);
  const turn = await agent.trajectory().turn("x", { maxTokens: 2, ignoreEos: true });
  assert.equal(tokensOf(turn.segments).length, 2);
  agent.close();
  assert.throws(() => connect("example.org:1", { token: "secret" }), CredentialsUnusable);
  assert.throws(() => connect(address, { tls, token: "two words" }), CredentialsUnusable);
});
