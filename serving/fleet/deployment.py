"""The Ray Serve application of a fleet: an ingress before replicas."""

import argparse
import copy
from collections.abc import Callable
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from ..http.frontend import Frontend
from ..http.settings import Settings
from .ingress import Ingress
from .replica import Replica
from .replica_processes import STRATEGY, bundle

MODULE = __name__.rpartition(".")[0]
HEALTH_PERIOD, HEALTH_TIMEOUT = 2.0, 30.0  # seconds; a dead process is noticed at the next check
OF_THE_PARSER = ("run", "error", "subparser", "flags")  # what the command line adds to parsed options


def application(
    options: argparse.Namespace,
    settings: Settings,
    make_frontend: Callable[[argparse.Namespace], Frontend],
    follow: Callable[[argparse.Namespace], int],
) -> serve.Application:
    """The application that parsed options of `entropic serve` describe.

    Args:
        options: the parsed options.
        settings: the settings of a server that follow from them.
        make_frontend: loads the model and starts the engine in the process of a replica.
        follow: what the other processes of a replica run, where it has several.
    """
    plain = copy.copy(options)
    for name in OF_THE_PARSER:
        vars(plain).pop(name, None)
    drain = {"graceful_shutdown_timeout_s": settings.drain, "graceful_shutdown_wait_loop_s": 0.5}
    rows = options.max_num_seqs
    configuration: dict[str, Any] = {
        **drain,
        "name": "replica",
        "max_ongoing_requests": options.max_queue + rows,
        "health_check_period_s": HEALTH_PERIOD,
        "health_check_timeout_s": HEALTH_TIMEOUT,
        "ray_actor_options": options.replica_resources,
    }
    if (processes := options.num_processes or 1) > 1:
        configuration["placement_group_bundles"] = [bundle(options.replica_resources)] * processes
        configuration["placement_group_strategy"] = STRATEGY
    if options.replica_routing == "prefix":
        configuration["request_router_config"] = RequestRouterConfig(
            request_router_class=f"{MODULE}.request_router.PrefixRouter",
            request_router_kwargs={"bound": max(1, rows // 4)},
        )
    most = options.max_replicas or options.replicas
    if most > options.replicas:
        configuration["autoscaling_config"] = AutoscalingConfig(
            min_replicas=options.replicas,
            initial_replicas=options.replicas,
            max_replicas=most,
            policy=AutoscalingPolicy(
                policy_function=f"{MODULE}.work:SecondsOfWork",
                policy_kwargs={"target": options.work_per_replica},
            ),
        )
    else:
        configuration["num_replicas"] = options.replicas
    replicas = serve.deployment(Replica).options(**configuration).bind(make_frontend, follow, plain)
    ingress = serve.deployment(Ingress).options(
        **drain,
        name="ingress",
        max_ongoing_requests=settings.limits.connections,
        ray_actor_options={"num_cpus": 0},
    )
    return ingress.bind(replicas, settings.limits.body, settings.request_timeout)
