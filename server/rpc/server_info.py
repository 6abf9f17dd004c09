"""GetServerInfo: the server's model, versions, limits and load."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field

from penstock.common.distribution import installed_version
from penstock.common.memory_file import host_id
from penstock.server.engine.protocol import Engine
from penstock.server.groups.buffer import GroupBuffer
from penstock.server.pool.engine import PoolEngine
from penstock.server.rpc.progress import Progress
from penstock.server.rpc.standard import Health
from penstock.server.turns.store import TrajectoryStore
from penstock.server.weights.switch import Switcher, WeightSwitch
from penstock.server.weights.versions import WeightVersions
from penstock.v1 import rollout_service_pb2, weights_pb2
from penstock.wire.messages import (
    GetServerInfoResponse,
    LoraSupport,
    ReplicaInfo,
    ServerLoad,
    TensorDescription,
)

SOURCES_OF_A_HUB = (
    weights_pb2.WEIGHT_SOURCE_KIND_INLINE,
    weights_pb2.WEIGHT_SOURCE_KIND_SHARED_MEMORY,
    weights_pb2.WEIGHT_SOURCE_KIND_CHECKPOINT,
    weights_pb2.WEIGHT_SOURCE_KIND_PEER,
)
SOURCES = (*SOURCES_OF_A_HUB, weights_pb2.WEIGHT_SOURCE_KIND_COLLECTIVE)


@dataclass(eq=False)
class ServerInfo:
    engine: Engine
    switch: WeightSwitch
    weights: WeightVersions
    switcher: Switcher
    store: TrajectoryStore
    buffer: GroupBuffer
    health: Health
    progress: Progress
    http_port: int
    """Port of the compatible endpoints; 0 if they are not served."""
    _server_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    _host_id: str = field(default_factory=host_id)

    async def get_server_info(
        self, request: rollout_service_pb2.GetServerInfoRequest
    ) -> rollout_service_pb2.GetServerInfoResponse:
        """Tensors and progress only on request."""
        description = self.engine.description
        load, limits = self._load(), description.adapters
        tensors = description.tensors.items() if request.with_tensors else ()
        return GetServerInfoResponse(
            server_version=installed_version(),
            model=description.model,
            active_weight_version=self.switch.active_version,
            staged_weight_versions=self.weights.staged_versions,
            max_context_length=description.max_context_length,
            vocab_size=description.vocab_size,
            weight_sources=SOURCES_OF_A_HUB if isinstance(self.engine, PoolEngine) else SOURCES,
            load=load,
            replicas=self._replicas(load),
            weight_dtype=description.weight_dtype,
            delta_base_weight_version=self.weights.delta_base_version,
            lora=limits and LoraSupport(max_rank=limits.max_rank, max_adapters=limits.max_adapters),
            http_port=self.http_port,
            adapter_weight_versions=self.switcher.adapter_versions,
            server_id=self._server_id,
            eos_token_ids=description.eos_token_ids,
            host_id=self._host_id,
            tensors=[
                TensorDescription(name=name, shape=tensor.shape, optional=tensor.optional)
                for name, tensor in tensors
            ],
            draining=self.health.draining,
            full_weight_version=self.switch.full_version,
            waits=self.progress.waits(),
            progress=self.progress.message() if request.with_progress else None,
        )

    def _replicas(
        self, load: rollout_service_pb2.ServerLoad
    ) -> list[rollout_service_pb2.ReplicaInfo]:
        if isinstance(self.engine, PoolEngine):
            return [member.message() for member in self.engine.roster.members]
        active = self.switch.active_version
        return [ReplicaInfo(state=self._state(), active_weight_version=active, load=load)]

    def _load(self) -> rollout_service_pb2.ServerLoad:
        stats = self.engine.stats()
        return ServerLoad(
            running_turn_count=stats.running,
            waiting_turn_count=stats.waiting,
            kv_cache_usage=stats.kv_cache_usage,
            open_trajectory_count=self.store.open_count,
            buffered_group_count=self.buffer.buffered_count,
            preemption_count=stats.preemptions,
        )

    def _state(self) -> rollout_service_pb2.ReplicaState.ValueType:
        if not self.switch.trusted:
            return rollout_service_pb2.REPLICA_STATE_UNAVAILABLE
        if self.health.draining:
            return rollout_service_pb2.REPLICA_STATE_DRAINING
        if self.switch.switching:
            return rollout_service_pb2.REPLICA_STATE_PAUSED
        return rollout_service_pb2.REPLICA_STATE_SERVING
