"""All workers send to one, which quantizes the sum again: the paper's two-sided quantization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dat.core.settings import SettingError, setting
from dat.distributed.lazy import dist
from dat.distributed.phases import MessageContent, Phase, PlannedBucket, PlannedExchange
from dat.distributed.protocols.base import Protocol
from dat.distributed.routes import GradientBucket, GradientRoute, RoundingKeys
from dat.distributed.traffic import SentBytes, to_all_others

if TYPE_CHECKING:
    from torch import Tensor

    from dat.distributed.quantizers import Quantizer


@dataclass(frozen=True, kw_only=True)
class Server(Protocol):
    """A worker is the server and quantizes again: the paper's two-sided quantization."""

    rank: int = setting(0, "rank of the worker that acts as the server", ge=0)

    def check(self, quantizer: Quantizer, workers: int) -> None:
        if self.rank >= workers:
            raise SettingError(
                f"protocol.rank = {self.rank}: must be below the number of workers, {workers}"
            )

    def route(self, bucket: GradientBucket) -> GradientRoute:
        return ServerRoute(bucket, self.rank)

    def phases(self, bucket: PlannedBucket) -> PlannedExchange:
        topology, size = bucket.topology, bucket.message().size
        content = MessageContent.of(bucket.message())
        workers, devices, remote = topology.workers, topology.devices, bucket.remote_workers
        encode = bucket.kernel_seconds("encode", content)
        decode = bucket.kernel_seconds("decode", content)
        serve = workers * bucket.kernel_seconds("add", content) + encode
        sent, inside = (workers - 1) * size, (devices - 1) * size
        link = max(remote, devices if remote else 0) * size
        send = Phase(
            intra_node=inside,
            worker_bytes=sent,
            # on a single machine every byte is both sent and received; of several machines the
            # server's is the busiest
            machine_bytes=sent if topology.shared else (sent + inside) / 2,
            messages=workers - 1,
            hops=1 if workers > 1 else 0,
        )
        return PlannedExchange(
            collect=(
                bucket.on_every_worker(encode),
                send._replace(ingress=link),
                Phase(serve, serve),
            ),
            spread=(send._replace(egress=link), bucket.on_every_worker(decode)),
            sent=2 * sent,
            busiest=sent,
            buffers=(workers + 1) * size,
        )


class ServerRoute(GradientRoute):
    """All send to one worker, which adds up, quantizes again, and sends to all."""

    def __init__(self, bucket: GradientBucket, server: int) -> None:
        super().__init__(bucket)
        self.server = server
        self.serves = self.world.rank == server
        self.layout = bucket.whole()
        self.sent = bucket.buffer(self.layout.size)
        self.received = bucket.buffer(self.world.size if self.serves else 0, self.layout.size)

    def collect(self, x: Tensor, keys: RoundingKeys, group: dist.ProcessGroup) -> SentBytes:
        self.encode(x, self.layout, self.sent, keys.own)
        rows = list(self.received) if self.serves else None
        dist.gather(self.sent, rows, dst=self.server, group=group)
        if not self.serves:
            near = self.server in self._ranks_on_this_node()
            return SentBytes(self.sent.nbytes, 0 if near else self.sent.nbytes)
        self.codec.add_up(self.received, self.layout, x)
        self.encode(x, self.layout, self.received[0], keys.common, hop=1)
        return SentBytes(0)

    def spread(self, x: Tensor, group: dist.ProcessGroup) -> SentBytes:
        rows = [self.received[0]] * self.world.size if self.serves else None
        dist.scatter(self.sent, rows, src=self.server, group=group)
        self.codec.decode(self.sent, self.layout, x)
        return to_all_others(self.sent, self.world) if self.serves else SentBytes(0)

    def _ranks_on_this_node(self) -> range:
        first = self.world.rank - self.world.local_rank
        return range(first, first + self.world.local_size)
