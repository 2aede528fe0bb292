"""POST /v1/weights: serve the weights of another directory of the same shape, between two steps. Off by default."""

from __future__ import annotations

import asyncio

from starlette.responses import Response

from lockstep.model import load
from lockstep.serve.api.errors import ApiError
from lockstep.serve.api.respond import json_response
from lockstep.serve.api.schema import WeightsRequest
from lockstep.serve.api.service import Service


async def update(service: Service, body: WeightsRequest) -> Response:
    """Running requests go on with the tokens they have; cached prefixes are forgotten."""
    if not service.config.weight_updates:
        raise ApiError(403, "weights cannot be replaced on this server: start it with --set serve.weight_updates=true.")
    model = service.worker.engine.model
    dtype = str(model.dtype).removeprefix("torch.")
    new = await asyncio.to_thread(load, body.path, dtype=dtype, numerics=model.ops.numerics)
    state = {name: parameter.detach() for name, parameter in new.decoder.named_parameters()}
    await service.worker.call(lambda: service.worker.engine.update_weights(state))
    return json_response({"model": service.name, "path": body.path, "parameters": len(state)})
