"""POST /v1/weights: serve the weights of another directory of the same shape, between two steps. Off by default."""

from __future__ import annotations

from starlette.responses import Response

from lockstep.serve.api.errors import ApiError
from lockstep.serve.api.respond import json_response
from lockstep.serve.api.schema import WeightsRequest
from lockstep.serve.api.service import Service


async def update(service: Service, body: WeightsRequest) -> Response:
    """Running requests go on with the tokens they have; cached prefixes are forgotten."""
    if not service.config.weight_updates:
        raise ApiError(403, "weights cannot be replaced on this server: start it with --set serve.weight_updates=true.")
    parameters = await service.engine.update_weights(body.path)
    return json_response({"model": service.name, "path": body.path, "parameters": parameters})
