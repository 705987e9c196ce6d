"""All of them together."""

from serving.endpoints import (
    describing,
    documenting,
    explaining,
    feedback,
    health,
    page,
    predicting,
    rollout,
    status,
    v2,
)
from serving.http.routes import Routes
from serving.worker import ModelWorker


def all_routes(worker: ModelWorker) -> Routes:
    """Every path that leads anywhere, by path."""
    routes: Routes = {}
    for module in (page, predicting, explaining, feedback, v2, describing, health, rollout):
        routes |= module.routes(worker)
    asking = {
        path
        for path, route in routes.items()
        if "POST" in route.methods and route.access == "caller"
    } | {"other"}
    routes |= status.routes(worker, asking)
    return routes | documenting.routes(worker, routes)
