"""Files to run servers without Ray: the container file, Kubernetes manifests and Prometheus rules."""

import argparse
import copy
import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from entropic_jax.serving.commands import serve_options
from tests.serving.exported_metrics import METRIC, exported_metrics, unmatched_brackets

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parents[2]
FLEET = ROOT / "serving" / "fleet"
FILES = sorted((FLEET / "kubernetes").glob("*.yaml"))
MANIFESTS = [
    pytest.param(manifest, id=f"{path.stem}-{manifest['kind']}")
    for path in FILES
    for manifest in yaml.safe_load_all(path.read_text("utf-8"))
]
RULES = [
    rule
    for group in yaml.safe_load((FLEET / "prometheus-rules.yaml").read_text("utf-8"))["groups"]
    for rule in group["rules"]
]
RECORDED = {rule["record"] for rule in RULES if "record" in rule}
VARIABLE = re.compile(r"\$\((\w+)\)")  # what Kubernetes replaces in arguments
LWS = {"LWS_LEADER_ADDRESS": "leader.example", "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "0"}
KUBERNETES = ("1.34", "1.37")  # the oldest that the manifests are for, and the latest with a schema


def of_kind(kind: str) -> list[dict]:
    return [param.values[0] for param in MANIFESTS if param.values[0]["kind"] == kind]


def pod_templates(manifest: dict) -> list[dict]:
    spec = manifest["spec"]
    if manifest["kind"] == "LeaderWorkerSet":
        return [spec["leaderWorkerTemplate"][name] for name in ("leaderTemplate", "workerTemplate")]
    return [spec["template"]] if manifest["kind"] == "Deployment" else []


ALL_PODS = [
    pytest.param(template["spec"], id=f"{param.id}-{number}")
    for param in MANIFESTS
    for number, template in enumerate(pod_templates(param.values[0]))
]
# Those that serve HTTP: all but the workers of a LeaderWorkerSet.
PODS = [param for param in ALL_PODS if not param.id.endswith("LeaderWorkerSet-1")]


def serve_arguments(container: dict) -> argparse.Namespace:
    """What `entropic serve` makes of the arguments of a container."""
    command, *arguments = (VARIABLE.sub(lambda match: LWS[match[1]], text) for text in container["args"])
    assert command == "serve"
    parser = argparse.ArgumentParser(exit_on_error=False)
    serve_options.add_arguments(parser)
    return parser.parse_args(arguments)


def problem_of(manifest: dict, version: str) -> str | None:
    """What the schemas of a Kubernetes version say against a manifest, unknown fields included."""
    validator = pytest.importorskip("kubernetes_validate", reason="pip install -e '.[manifests]'")
    if manifest["kind"] == "LeaderWorkerSet":
        return problem_of_group(manifest, version)
    try:
        validator.validate(manifest, version, strict=True)
    except validator.ValidationError as error:
        return error.message
    return None


def problem_of_group(manifest: dict, version: str) -> str | None:
    """The same for a LeaderWorkerSet, whose pods are validated as those of Deployments."""
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((FLEET / "leaderworkerset.schema.json").read_text("utf-8"))
    for error in jsonschema.Draft202012Validator(schema).iter_errors(manifest):
        return error.message
    for template in pod_templates(manifest):
        labels = template["metadata"]["labels"]
        spec = {"selector": {"matchLabels": labels}, "template": template}
        deployment = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "x"}, "spec": spec}
        if (problem := problem_of(deployment, version)) is not None:
            return problem
    return None


def test_every_kind_of_replica_has_a_file():
    assert {path.stem for path in FILES} >= {"cpu", "gpu", "tpu", "tpu-slice"}
    names = [(param.values[0]["kind"], param.values[0]["metadata"]["name"]) for param in MANIFESTS]
    assert len(set(names)) == len(names)  # all files can be applied to one namespace


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("manifest", MANIFESTS)
def test_manifests_are_valid(manifest, version):
    assert problem_of(manifest, version) is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda spec: spec.update(replicas="two"), "'two'"),
        (lambda spec: spec["template"]["spec"].update(gracePeriod=75), "gracePeriod"),
        (lambda spec: spec.pop("selector"), "selector"),
    ],
)
def test_an_invalid_manifest_is_found(change, said):
    manifest = copy.deepcopy(of_kind("Deployment")[0])
    change(manifest["spec"])
    assert said in (problem_of(manifest, KUBERNETES[-1]) or "")


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (["size"], 0, "0 is less than"),
        (["restartPolicy"], "Never", "'Never' is not one of"),
        (["sizes"], 2, "'sizes'"),
        (["workerTemplate", "spec", "containers", 0, "imag"], "x", "imag"),
        (["leaderTemplate", "spec", "containers"], None, "None"),
    ],
)
def test_an_invalid_group_is_found(path, value, said):
    (group,) = copy.deepcopy(of_kind("LeaderWorkerSet"))
    *parents, name = path
    target = group["spec"]["leaderWorkerTemplate"]
    for parent in parents:
        target = target[parent]
    target[name] = value
    assert said in (problem_of(group, KUBERNETES[-1]) or "")


@pytest.mark.parametrize("pod", PODS)
def test_containers_start_a_server_that_others_can_reach(pod):
    (container,) = pod["containers"]
    options = serve_arguments(container)
    port = container["ports"][0]
    assert (options.host, options.port) == ("0.0.0.0", port["containerPort"])
    mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
    if any(argument.startswith("--model") for argument in container["args"]):
        assert str(options.model.parent) in mounted
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes


@pytest.mark.parametrize("pod", PODS)
def test_a_pod_has_time_to_drain(pod):
    (container,) = pod["containers"]
    pause = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pause >= 5
    assert pod["terminationGracePeriodSeconds"] >= pause + serve_arguments(container).shutdown_timeout


@pytest.mark.parametrize("pod", PODS)
def test_probes_use_routes_of_the_server(pod):
    service = pytest.importorskip("entropic_jax.serving.http.routes.service")
    routes = {route.path for route in service.router(None).routes if "GET" in route.methods}
    (container,) = pod["containers"]
    probes = {name: container[name]["httpGet"]["path"] for name in container if name.endswith("Probe")}
    assert probes == {"startupProbe": "/ready", "readinessProbe": "/ready", "livenessProbe": "/health"}
    assert set(probes.values()) <= routes
    assert all(container[name]["httpGet"]["port"] == container["ports"][0]["name"] for name in probes)


def test_chips_are_as_many_as_the_mesh_has():
    for param in PODS:
        (container,) = param.values[0]["containers"]
        chips = int(container["resources"]["limits"].get("google.com/tpu", 0))
        if chips:
            options = serve_arguments(container)
            processes = options.num_processes or 1
            assert options.tensor_parallel_size * options.data_parallel_size == chips * processes


def test_a_group_runs_one_command_in_all_of_its_pods():
    (group,) = of_kind("LeaderWorkerSet")
    leader, worker = (template["spec"] for template in pod_templates(group))
    assert leader["containers"][0]["args"] == worker["containers"][0]["args"]
    options = serve_arguments(leader["containers"][0])
    assert str(group["spec"]["leaderWorkerTemplate"]["size"]) == LWS["LWS_GROUP_SIZE"]
    port = int(options.coordinator_address.rpartition(":")[2])
    assert port in [port["containerPort"] for port in leader["containers"][0]["ports"]]
    (service,) = (x for x in of_kind("Service") if x["metadata"]["name"] == group["metadata"]["name"])
    chosen = [
        service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
        for template in pod_templates(group)
    ]
    assert chosen == [True, False]  # the leader serves HTTP


@pytest.mark.parametrize("kind", ["Service", "PodDisruptionBudget", "HorizontalPodAutoscaler"])
def test_every_deployment_has_its_companions(kind):
    for deployment in of_kind("Deployment"):
        labels = deployment["spec"]["template"]["metadata"]["labels"]
        (companion,) = (x for x in of_kind(kind) if x["metadata"]["name"] == deployment["metadata"]["name"])
        spec = companion["spec"]
        if kind == "HorizontalPodAutoscaler":
            assert spec["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
            assert {metric["pods"]["metric"]["name"] for metric in spec["metrics"]} <= RECORDED
            assert spec["minReplicas"] <= deployment["spec"]["replicas"] <= spec["maxReplicas"]
        else:
            selector = spec["selector"].get("matchLabels", spec["selector"])
            assert selector.items() <= labels.items()


def test_rules_have_the_fields_of_rules():
    fields = {"expr", "for", "labels", "annotations", "alert", "record"}
    assert len(RULES) > 10
    for rule in RULES:
        assert rule.keys() <= fields and "expr" in rule
        assert ("alert" in rule) != ("record" in rule)
        assert re.fullmatch(r"\d+[smh]", rule.get("for", "0s"))
        if "alert" in rule:
            assert rule["labels"]["severity"] in ("critical", "warning", "info")
            assert rule["annotations"]["summary"]
    names = [rule.get("alert", rule.get("record")) for rule in RULES]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.get("alert", rule.get("record")))
def test_brackets_of_rules_match(rule):
    assert not unmatched_brackets(rule["expr"])


def test_rules_query_metrics_that_the_server_exports():
    derived = {name for rule in RULES for name in re.findall(r"\bentropic:[\w:]+", rule["expr"])}
    assert derived <= RECORDED
    queried = {name for rule in RULES for name in METRIC.findall(rule["expr"])}
    assert len(queried) > 8
    assert queried - exported_metrics() == set()


def test_the_container_file_copies_what_exists_and_names_extras_that_exist():
    text = (FLEET / "Containerfile").read_text("utf-8")
    lines = text.replace("\\\n", " ").splitlines()
    copied = [
        name for line in lines if re.match(r"COPY (?!--from)", line) for name in shlex.split(line)[1:-1]
    ]
    assert {"pyproject.toml", "requirements.lock", "entropic_jax", "models", "serving"} <= set(copied)
    assert [name for name in copied if not (ROOT / name).exists()] == []
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    stated = re.findall(r"EXTRAS=([\w,]+)", text)
    assert {"serve", "serve,cuda", "serve,tpu"} == set(stated)
    assert {name for names in stated for name in names.split(",")} <= extras.keys()
    (command,) = (json.loads(line.removeprefix("CMD ")) for line in lines if line.startswith("CMD "))
    assert serve_arguments({"args": command}).host == "0.0.0.0"
