"""What every route of a gateway shares, built once at start."""

from __future__ import annotations

from dataclasses import dataclass

from services.gateway.admission import unavailable
from services.gateway.body import Bodies
from services.gateway.fleet import Fleet
from services.gateway.inflight import Inflight
from services.gateway.metrics_defs import GatewayMetrics
from services.gateway.request_ids import RequestIds
from shared.settings import GatewaySettings, LimitSettings


@dataclass(slots=True)
class GatewayState:
    """model: the name that clients use. secret: of the deployment, for salts. draining: no new work is taken."""

    settings: GatewaySettings
    limits: LimitSettings
    model: str
    secret: bytes
    inflight: Inflight
    fleet: Fleet
    metrics: GatewayMetrics
    ids: RequestIds
    bodies: Bodies
    draining: bool = False

    def check_open(self) -> None:
        """TryLater while this gateway is shutting down."""
        if self.draining:
            raise unavailable("this gateway is shutting down", "shutting_down")
