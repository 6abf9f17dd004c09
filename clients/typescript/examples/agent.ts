import { connect } from "@penstock/client";

const penstock = connect(process.argv[2] ?? "127.0.0.1:50051");
await penstock.worker({ concurrency: 32 }, async ({ task, trajectory }) => {
  let turn = await trajectory.turn();
  if (!turn.text.includes(task.metadata.answer)) {
    turn = await trajectory.turn("Look again: what is it?");
  }
  return Number(turn.text.includes(task.metadata.answer));
});
