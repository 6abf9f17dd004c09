/** The generated stubs of `penstock.v1`, for calls that the client itself does not offer. */

export * from "./gen/penstock/v1/conversation.js";
export * from "./gen/penstock/v1/rejection.js";
export * from "./gen/penstock/v1/rollout_service.js";
export * from "./gen/penstock/v1/task_service.js";
export * from "./gen/penstock/v1/trainer_service.js";
export * from "./gen/penstock/v1/trajectory.js";
export * from "./gen/penstock/v1/weights.js";
