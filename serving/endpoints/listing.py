"""All routes of a worker: those of the core and those of its extensions."""

from serving.endpoints import describing, documenting, health, predicting, status
from serving.http.routes import Routes
from serving.worker import ModelWorker


def all_routes(worker: ModelWorker) -> Routes:
    """Every path that is served, by path."""
    routes: Routes = {}
    for module in (predicting, describing, health):
        routes |= module.routes(worker)
    for hooks in worker.hooks.values():
        routes |= hooks.routes
    asking = {
        path
        for path, route in routes.items()
        if "POST" in route.methods and route.access == "caller"
    } | {"other"}
    routes |= status.routes(worker, asking)
    return routes | documenting.routes(worker, routes)
