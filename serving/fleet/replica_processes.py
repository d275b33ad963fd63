"""Further processes of a replica whose model is divided over several: actors in its placement group.

Process 0 is the replica itself. Ray places the others, and ends them with the replica, whose actors they are.
The replica ends with any of them, and Ray then replaces it.
"""

import argparse
import copy
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ..engine.process_group import end_process

STRATEGY = "PACK"  # on as few hosts as have the resources


class ReplicaProcess:
    """The actor of a process that is not process 0."""

    def run(self, follow: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
        """Run what process 0 runs until it ends; the exit status.

        Args:
            follow: connects this process, and follows process 0.
            options: the parsed options, with the addresses of the processes.
        """
        return follow(options)


def bundle(resources: Mapping[str, Any]) -> dict[str, float]:
    """The resources of a process as a bundle of a placement group.

    Args:
        resources: the value of `--replica-resources`.

    >>> bundle({"num_gpus": 1, "resources": {"TPU": 4}, "accelerator_type": "H100"})
    {'CPU': 1, 'GPU': 1, 'TPU': 4, 'accelerator_type:H100': 0.001}
    """
    counts: dict[str, float] = {"CPU": resources.get("num_cpus", 1), "GPU": resources.get("num_gpus", 0)}
    counts |= {"memory": resources.get("memory", 0), **resources.get("resources", {})}
    if (kind := resources.get("accelerator_type")) is not None:
        counts[f"accelerator_type:{kind}"] = 0.001
    return {name: count for name, count in counts.items() if count}


def start_processes(
    options: argparse.Namespace, follow: Callable[[argparse.Namespace], int]
) -> argparse.Namespace:
    """Start the other processes of this replica; the options of process 0, by which it connects to them.

    Args:
        options: the parsed options; `num_processes` counts this process, too.
        follow: what the others run with their options.
    """
    host, group = ray.util.get_node_ip_address(), ray.util.get_current_placement_group()
    with socket.socket() as free:
        free.bind(("", 0))
        address = f"[{host}]" if ":" in host else host
        address = f"{address}:{free.getsockname()[1]}"
    actor = ray.remote(ReplicaProcess)
    results = []
    for process_id in range(1, options.num_processes):
        placed = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=process_id)
        process = actor.options(**options.replica_resources, scheduling_strategy=placed).remote()
        results.append(process.run.remote(follow, _stated(options, address, process_id)))
    threading.Thread(target=_watch, args=(results,), name="replica-processes", daemon=True).start()
    return _stated(options, address, 0)


def _stated(options: argparse.Namespace, address: str, process_id: int) -> argparse.Namespace:
    stated = copy.copy(options)
    stated.coordinator_address, stated.process_id = address, process_id
    return stated


def _watch(results: list[Any]) -> None:
    """End this process once another has failed; a failure before they are connected would go unnoticed."""
    left = results
    while left:
        (ended, *_), left = ray.wait(left)
        try:
            ray.get(ended)
        except RayError as error:
            end_process(f"a process of the replica has failed: {error}")
