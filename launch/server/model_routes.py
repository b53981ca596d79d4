"""The routes that say what is served: /v1/models.

Called by: app.py, which wraps each with the error boundary.
"""

from starlette.requests import Request
from starlette.responses import Response

from .protocol import ModelCard, ModelList
from .routes import json_response
from .service import Service


async def list_models(service: Service, request: Request) -> Response:
    """GET /v1/models."""
    return json_response(ModelList(data=[_model_card(service)]))


async def get_model(service: Service, request: Request) -> Response:
    """GET /v1/models/{id}."""
    service.check_model(request.path_params["model_id"])
    return json_response(_model_card(service))


def _model_card(service: Service) -> ModelCard:
    return ModelCard(
        id=service.model_name,
        created=service.created_at,
        root=service.model_root,
        max_model_len=service.max_model_len,
        weights_version=service.weights_version,
    )
