"""GetServerInfo: the server's model, versions, limits and load."""

from __future__ import annotations

import uuid
from importlib import metadata

from penstock.common.memory_file import host_id
from penstock.server.engine.protocol import Engine
from penstock.server.groups.buffer import GroupBuffer
from penstock.server.pool.engine import PoolEngine
from penstock.server.rpc.health import Health
from penstock.server.turns.store import TrajectoryStore
from penstock.server.weights.switch import Switcher, WeightSwitch
from penstock.server.weights.versions import WeightVersions
from penstock.v1 import rollout_service_pb2, weights_pb2
from penstock.wire.codec import twin

GetServerInfoResponse = twin(rollout_service_pb2.GetServerInfoResponse)
ServerLoad = twin(rollout_service_pb2.ServerLoad)
LoraSupport = twin(rollout_service_pb2.LoraSupport)
ReplicaInfo = twin(rollout_service_pb2.ReplicaInfo)
TensorDescription = twin(rollout_service_pb2.TensorDescription)


SOURCES_OF_A_HUB = (
    weights_pb2.WEIGHT_SOURCE_KIND_INLINE,
    weights_pb2.WEIGHT_SOURCE_KIND_SHARED_MEMORY,
    weights_pb2.WEIGHT_SOURCE_KIND_CHECKPOINT,
    weights_pb2.WEIGHT_SOURCE_KIND_PEER,
)
SOURCES = (*SOURCES_OF_A_HUB, weights_pb2.WEIGHT_SOURCE_KIND_COLLECTIVE)


class ServerInfo:
    def __init__(
        self,
        engine: Engine,
        switch: WeightSwitch,
        weights: WeightVersions,
        switcher: Switcher,
        store: TrajectoryStore,
        buffer: GroupBuffer,
        health: Health,
        http_port: int,
    ) -> None:
        """`http_port` is the port of the compatible endpoints; 0 if they are not served."""
        self._engine = engine
        self._of_engines = engine.replicas if isinstance(engine, PoolEngine) else None
        self._switch = switch
        self._weights = weights
        self._switcher = switcher
        self._store = store
        self._buffer = buffer
        self._server_id = uuid.uuid4().hex
        self._host_id = host_id()
        self._health = health
        self.http_port = http_port

    async def get_server_info(
        self, request: rollout_service_pb2.GetServerInfoRequest
    ) -> rollout_service_pb2.GetServerInfoResponse:
        """Tensors only on request."""
        description = self._engine.description
        load = self._load()
        return GetServerInfoResponse(
            server_version=metadata.version("penstock"),
            model=description.model,
            active_weight_version=self._switch.active_version,
            staged_weight_versions=self._weights.staged_versions,
            max_context_length=description.max_context_length,
            vocab_size=description.vocab_size,
            weight_sources=SOURCES if self._of_engines is None else SOURCES_OF_A_HUB,
            load=load,
            replicas=self._replicas(load),
            weight_dtype=description.weight_dtype,
            delta_base_weight_version=self._weights.delta_base_version,
            lora=self._lora(),
            http_port=self.http_port,
            adapter_weight_versions=self._switcher.adapter_versions,
            server_id=self._server_id,
            eos_token_ids=description.eos_token_ids,
            host_id=self._host_id,
            tensors=self._tensors() if request.with_tensors else (),
            draining=self._health.draining,
            full_weight_version=self._switch.full_version,
        )

    def _replicas(
        self, load: rollout_service_pb2.ServerLoad
    ) -> list[rollout_service_pb2.ReplicaInfo]:
        if self._of_engines is not None:
            return self._of_engines()
        active = self._switch.active_version
        return [ReplicaInfo(state=self._state(), active_weight_version=active, load=load)]

    def _tensors(self) -> list[rollout_service_pb2.TensorDescription]:
        return [
            TensorDescription(name=name, shape=tensor.shape, optional=tensor.optional)
            for name, tensor in self._engine.description.tensors.items()
        ]

    def _lora(self) -> rollout_service_pb2.LoraSupport | None:
        limits = self._engine.description.adapters
        if limits is None:
            return None
        return LoraSupport(max_rank=limits.max_rank, max_adapters=limits.max_adapters)

    def _load(self) -> rollout_service_pb2.ServerLoad:
        stats = self._engine.stats()
        return ServerLoad(
            running_turn_count=stats.running,
            waiting_turn_count=stats.waiting,
            kv_cache_usage=stats.kv_cache_usage,
            open_trajectory_count=self._store.open_count,
            buffered_group_count=self._buffer.buffered_count,
            preemption_count=stats.preemptions,
        )

    def _state(self) -> rollout_service_pb2.ReplicaState.ValueType:
        if not self._switch.trusted:
            return rollout_service_pb2.REPLICA_STATE_UNAVAILABLE
        if self._health.draining:
            return rollout_service_pb2.REPLICA_STATE_DRAINING
        if self._switch.switching:
            return rollout_service_pb2.REPLICA_STATE_PAUSED
        return rollout_service_pb2.REPLICA_STATE_SERVING
