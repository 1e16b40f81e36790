"""What the values promise is rendered: restricted pods, names that fit the code, CRD, hooks."""

from __future__ import annotations

import importlib.util
import json
import re
import tarfile
from pathlib import Path

import pytest
import yaml
from spottrain_operator.agent.settings import PREFIX, AgentSettings
from spottrain_operator.api.job_defaults import JobDefaults, problem_of
from spottrain_operator.api.node_pools import CAPACITY_LABELS, CapacityType, Pool
from spottrain_operator.api.prices import parse
from spottrain_operator.names import Platform
from spottrain_operator.settings import Settings as OperatorSettings

from tests.support.environment import read
from tests.support.helm import CHART, KUBERNETES, NAMESPACE, ROOT, Object, find, helm, render, template

CRD = ROOT / "crds" / "trainingjobs.yaml"
SCHEMA = json.loads((CHART / "values.schema.json").read_text())


@pytest.fixture(scope="module")
def objects() -> list[Object]:
    return render()


def pod_templates(objects: list[Object]) -> dict[str, Object]:
    """By the name of the container: templates of what makes pods, and the pod of `helm test`."""
    made = [o["spec"]["template"] for o in objects if o["kind"] in ("Deployment", "DaemonSet", "Job")]
    made += [o for o in objects if o["kind"] == "Pod"]
    return {template["spec"]["containers"][0]["name"]: template for template in made}


def env_of(template: Object) -> dict[str, str]:
    return {e["name"]: e.get("value", "from the pod") for e in template["spec"]["containers"][0]["env"]}


# --- values --------------------------------------------------------------------------------------------
def test_helm_lint_finds_nothing() -> None:
    done = helm("lint", "--strict", *KUBERNETES, CHART)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    "settings",
    [
        ['watchNamespaces=["ml","research"]'],
        ["agent.enabled=false"],
        ['agent.namespace="kube-system"', "agent.admissionPolicy=false"],
        ['agent.nodeSelector={"pool":"gpu"}', 'agent.priorityClassName=""', "agent.pollSeconds=0.5"],
        ['imagePullSecrets=[{"name":"registry"}]', 'operator.priorityClassName="system-cluster-critical"'],
        ['operator.nodeSelector={"pool":"system"}', 'operator.tolerations=[{"operator":"Exists"}]'],
        ['defaultPool={"name":"g","platform":"GKE","tolerations":[{"key":"gpu","operator":"Exists"}]}'],
        ["crds.enabled=false", "uninstall.stripFinalizers=false", "operator.replicas=0"],
    ],
)
def test_values_of_each_kind_render(settings: list[str]) -> None:
    assert render(*settings)


def test_the_operator_can_read_the_prices_that_the_values_give() -> None:
    rate = {"instanceType": "p4d.24xlarge", "capacityType": "Reserved", "usdPerHour": 12.5}
    found = find(render(f"prices={json.dumps([rate])}"), "ConfigMap", "spottrain-prices")
    prices = parse(found["data"]["prices.json"])
    (history,) = prices.rates.values()
    assert history[0].usd_per_hour == 12.5 and not prices.problems
    pod = pod_templates(render('priceConfigMap="ours"'))["operator"]["spec"]
    (volume,) = [v["projected"]["sources"] for v in pod["volumes"] if v["name"] == "prices"]
    items = [{"key": "prices.json", "path": OperatorSettings().price_file.name}]
    assert volume == [{"configMap": {"name": "ours", "items": items, "optional": True}}]
    (mount,) = [m for m in pod["containers"][0]["volumeMounts"] if m["name"] == "prices"]
    assert Path(mount["mountPath"]) == OperatorSettings().price_file.parent


def test_two_price_lists_are_refused_with_a_sentence() -> None:
    rate = '[{"instanceType":"a","capacityType":"Spot","usdPerHour":1}]'
    done = template(f"prices={rate}", 'priceConfigMap="ours"')
    assert done.returncode and "prices and priceConfigMap exclude each other" in done.stderr


@pytest.mark.parametrize(
    "setting",
    [
        'prices=[{"instanceType":"a","capacityType":"Spot","usdPerHour":0}]',
        'prices=[{"instanceType":"a","capacityType":"SpotFirst","usdPerHour":1}]',
        'prices=[{"instanceType":"a","capacityType":"Spot"}]',
        "agnet.enabled=false",
        "agent.enable=false",
        'image.operator.repo="x"',
        'operator.resources.request={"cpu":"1"}',
        "operator.replicas=6",
        'defaultPool.platform="aws"',
        'jobDefaults.prefix="s3://team/runs"',
        'defaultPool.tolerations=[{"effects":"NoSchedule"}]',
        "agent.pollSeconds=0",
        'agent.platform="gcp"',
        "operator.tuning.deadSlackSeconds=1e12",
        "operator.tuning.progressSeconds=0",
        "operator.tuning.leaseSeconds=15",
        "operator.lostNodeSeconds=1000000",
        'agent.nodeSelector={"spot":true}',
        'watchNamespaces="ml"',
        "crds.install=true",
        'operator.spotNodes="Prefer"',
        'operator.affinity={"nodeSelectorTerms":[]}',
        "operator.podDisruptionBudget.minAvailable=1",
        "metrics.podMonitor.enable=true",
        "networkPolicy.operator.apiServerPorts=[]",
        'agent.metadataEndpoint="169.254.169.254"',
        'agent.namespace="a b"',
        'watchNamespaces=["ml", "ML"]',
        'image.operator.digest="0a1b"',
        'image.sync.digest="0a1b"',
    ],
)
def test_a_value_that_is_misspelt_or_makes_no_sense_is_refused(setting: str) -> None:
    done = template(setting)
    assert done.returncode != 0
    assert "values don't meet the specifications of the schema" in done.stderr


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ('jobDefaults.pools=["a100"]', 'jobDefaults.pools: "a100" is not in pools'),
        (
            'operator.extraEnv=[{"name":"SPOTTRAIN_OPERATOR_POOLS","value":"[]"}]',
            "operator.extraEnv: SPOTTRAIN_OPERATOR_POOLS is set by the chart: use its values",
        ),
        ("networkPolicy.trainers.enabled=true", "name them in networkPolicy.trainers.namespaces"),
    ],
)
def test_values_that_do_not_fit_together_are_refused_with_a_sentence(setting: str, says: str) -> None:
    done = template(setting)
    assert done.returncode != 0
    assert says in done.stderr


@pytest.mark.parametrize(
    "prefix",
    [
        "team/runs",
        "s3://b",
        "s3://Team/runs",
        "s3://bucket/a?b",
        "s3://bucket/a b",
        "s3://bucket/runs ",
        " s3://bucket/runs",
        "s3://bucket//runs",
        "s3://bucket/runs//",
        "gs://bucket/a//b",
        "file:////",
        "file:///mnt//runs",
        "https://bucket/runs",
        "az://c/runs",
    ],
)
def test_a_prefix_that_the_operator_refuses_is_refused_by_the_chart(prefix: str) -> None:
    assert problem_of(JobDefaults(checkpoint_prefix=prefix), [])
    done = template(f"jobDefaults.checkpointPrefix={json.dumps(prefix)}")
    assert done.returncode != 0 and "at '/jobDefaults/checkpointPrefix'" in done.stderr


@pytest.mark.parametrize(
    "prefix", ["s3://bucket", "s3://bucket/a/b/", "gs://my_bucket/a", "file:///mnt/runs"]
)
def test_a_prefix_that_the_operator_takes_is_taken_by_the_chart(prefix: str) -> None:
    assert problem_of(JobDefaults(checkpoint_prefix=prefix), []) == ""
    assert template(f"jobDefaults.checkpointPrefix={json.dumps(prefix)}").returncode == 0


# --- pods ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["operator", "agent", "uninstall", "test"])
def test_every_pod_of_ours_is_restricted(objects: list[Object], name: str) -> None:
    spec = pod_templates(objects)[name]["spec"]
    (container,) = spec["containers"]
    assert spec["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 65532,
        "runAsGroup": 65532,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert not {"hostPID", "hostIPC"} & spec.keys()
    assert spec.get("hostNetwork", False) is (name == "agent")
    assert all(v.keys() - {"name"} <= {"emptyDir", "projected"} for v in spec.get("volumes", []))
    assert "memory" in container["resources"]["limits"] and "cpu" in container["resources"]["requests"]


@pytest.mark.parametrize("name", ["operator", "agent", "uninstall"])
def test_every_pod_starts_a_module_that_exists_without_a_shell(objects: list[Object], name: str) -> None:
    (container,) = pod_templates(objects)[name]["spec"]["containers"]
    python, flag, module = container["command"]
    assert (python, flag, "args" in container) == ("python3", "-m", False)
    found = importlib.util.find_spec(module)
    assert found is not None
    if found.submodule_search_locations is not None:
        assert importlib.util.find_spec(f"{module}.__main__") is not None


def test_a_tag_of_its_own_reaches_every_pod() -> None:
    changed = render('image.operator={"repository":"r.example/o","tag":"dev","pullPolicy":"Never"}')
    containers = [t["spec"]["containers"][0] for t in pod_templates(changed).values()]
    assert {(c["image"], c["imagePullPolicy"]) for c in containers} == {("r.example/o:dev", "Never")}


def test_selectors_match_their_own_pods_and_no_others(objects: list[Object]) -> None:
    selectors = [
        (o["spec"]["selector"]["matchLabels"], o["spec"]["template"]["metadata"]["labels"])
        for o in objects
        if o["kind"] in ("Deployment", "DaemonSet")
    ]
    for selector, own in selectors:
        matching = [labels for _, labels in selectors if selector.items() <= labels.items()]
        assert matching == [own]


def placement(objects: list[Object]) -> Object:
    spec: Object = find(objects, "Deployment", "spottrain-operator")["spec"]["template"]["spec"]
    return spec


def test_renewals_of_the_lease_have_a_flow_before_that_of_service_accounts(objects: list[Object]) -> None:
    spec = find(objects, "FlowSchema", "spottrain-operator-leader")["spec"]
    assert spec["priorityLevelConfiguration"] == {"name": "leader-election"}
    assert spec["matchingPrecedence"] < 9000, "the API server's own schema service-accounts"
    (rule,) = spec["rules"]
    account = {"name": "spottrain-operator", "namespace": NAMESPACE}
    assert rule["subjects"] == [{"kind": "ServiceAccount", "serviceAccount": account}]
    (leases,) = rule["resourceRules"]
    assert (leases["resources"], leases["namespaces"]) == (["leases"], [NAMESPACE])
    role = find(objects, "Role", "spottrain-operator-leader")
    assert set(leases["verbs"]) == {verb for granted in role["rules"] for verb in granted["verbs"]}
    assert "FlowSchema" not in {o["kind"] for o in render("operator.leaseFlowSchema=false")}


@pytest.mark.parametrize("how", ["Never", "Avoid"])
def test_the_operator_is_kept_off_spot_nodes(how: str) -> None:
    node = placement(render(f'operator.spotNodes="{how}"'))["affinity"]["nodeAffinity"]
    if how == "Never":
        (term,) = node["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    else:
        (wish,) = node["preferredDuringSchedulingIgnoredDuringExecution"]
        term = wish["preference"]
    assert len(node) == 1 and {e["operator"] for e in term["matchExpressions"]} == {"NotIn"}
    kept_off = {(e["key"], value) for e in term["matchExpressions"] for value in e["values"]}
    assert kept_off == CAPACITY_LABELS[CapacityType.SPOT]


def test_an_affinity_of_ones_own_replaces_the_charts_of_that_kind_alone(objects: list[Object]) -> None:
    given: Object = {"preferredDuringSchedulingIgnoredDuringExecution": []}
    changed = placement(render(f"operator.affinity.podAntiAffinity={json.dumps(given)}"))["affinity"]
    assert changed["podAntiAffinity"] == given
    assert changed["nodeAffinity"] == placement(objects)["affinity"]["nodeAffinity"]
    wishes = placement(objects)["affinity"]["podAntiAffinity"]
    keys = [
        t["podAffinityTerm"]["topologyKey"] for t in wishes["preferredDuringSchedulingIgnoredDuringExecution"]
    ]
    assert keys == ["kubernetes.io/hostname", "topology.kubernetes.io/zone"]


def test_the_install_of_the_documentation_leaves_no_image_without_its_registry() -> None:
    """And it builds each image that a job, or `helm test`, then pulls."""
    page = (ROOT / "docs" / "cluster" / "install.md").read_text()
    install = page.partition("## Images and chart")[2].partition("```\n")[0]
    install = re.sub(r"[\"$]", "", install.partition("export REGISTRY=")[2].partition("\n")[2])
    given = re.findall(r"--set (\S+)=(\S+)", install)
    assert given and "docker build --target image --tag REGISTRY/spottrain-image" in install
    built = install.partition("for image in ")[2].partition(";")[0].split()
    changed = render(*(f"{name}={json.dumps(value)}" for name, value in given))
    containers = [c for t in pod_templates(changed).values() for c in t["spec"]["containers"]]
    trained = next(o for o in changed if o["kind"] == "TrainingJob")["spec"]["template"]["spec"]["containers"]
    images = {container["image"] for container in (*containers, *trained)}
    images.add(env_of(pod_templates(changed)["operator"])["SPOTTRAIN_OPERATOR_SYNC_IMAGE"])
    assert images == {f"REGISTRY/spottrain-{image}:{CHART_VERSION}" for image in built}


def test_the_other_images_are_beside_the_operators_unless_they_are_named() -> None:
    changed = render(
        'image.operator.repository="r.example:5000/a/b/my-operator"', 'image.sync.repository="x/sync"'
    )
    settings = read(OperatorSettings, env_of(pod_templates(changed)["operator"]))
    assert settings.sync_image == f"x/sync:{CHART_VERSION}"
    beside = render('image.operator.repository="r.example:5000/a/b/my-operator"')
    settings = read(OperatorSettings, env_of(pod_templates(beside)["operator"]))
    assert settings.sync_image == f"r.example:5000/a/b/spottrain-sync:{CHART_VERSION}"


def test_spread_constraints_without_a_selector_mean_the_operators_pods() -> None:
    zone = {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
    other = zone | {"labelSelector": {"matchLabels": {"a": "b"}}}
    changed = render(f"operator.topologySpreadConstraints={json.dumps([zone, other])}")
    mine, theirs = placement(changed)["topologySpreadConstraints"]
    selector = find(changed, "Deployment", "spottrain-operator")["spec"]["selector"]
    assert mine == zone | {"labelSelector": selector} and theirs == other


@pytest.mark.parametrize(("name", "value"), [("operator", "operator"), ("agent", "agent")])
def test_what_a_team_sets_on_pods_reaches_them(name: str, value: str) -> None:
    secret = {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}
    changed = render(
        'podLabels={"team":"all","both":"all"}',
        'podAnnotations={"mesh":"off"}',
        f'{value}.podLabels={{"both":"own","app.kubernetes.io/name":"x"}}',
        f'{value}.podAnnotations={{"mesh":"on"}}',
        f"{value}.extraEnv={json.dumps([secret])}",
        f'{value}.serviceAccount.annotations={{"role":"arn"}}',
        f'{value}.priorityClassName="high"',
    )
    template = pod_templates(changed)[name]
    labels = template["metadata"]["labels"]
    assert (labels["team"], labels["both"], labels["app.kubernetes.io/name"]) == ("all", "own", "spottrain")
    assert template["metadata"]["annotations"] == {"mesh": "on"}
    assert secret in template["spec"]["containers"][0]["env"]
    assert template["spec"]["priorityClassName"] == "high"
    account = find(changed, "ServiceAccount", f"spottrain-{name}")
    assert account["metadata"]["annotations"] == {"role": "arn"}


def test_a_digest_comes_before_a_tag() -> None:
    digest = "sha256:" + "0a" * 32
    image = {"repository": "r.example/o", "tag": "dev", "digest": digest}
    changed = pod_templates(render(f"image.operator={json.dumps(image)}"))
    assert {t["spec"]["containers"][0]["image"] for t in changed.values()} == {f"r.example/o@{digest}"}


CHART_VERSION = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
IN_A_POD = OperatorSettings(
    lease_namespace="from the pod", identity="from the pod", sync_image=f"spottrain-sync:{CHART_VERSION}"
)


def test_the_operators_own_defaults_are_the_charts(objects: list[Object]) -> None:
    assert read(OperatorSettings, env_of(pod_templates(objects)["operator"])) == IN_A_POD


def test_the_sidecar_of_mode_sync_has_the_image_that_the_values_name() -> None:
    changed = render(f'image.sync={{"repository":"r/sync","digest":"sha256:{"0a" * 32}"}}')
    settings = read(OperatorSettings, env_of(pod_templates(changed)["operator"]))
    assert settings.sync_image == f"r/sync@sha256:{'0a' * 32}"


def test_the_operator_reads_the_environment_that_the_chart_writes() -> None:
    tolerations = [{"key": "gpu", "operator": "Exists"}]
    pool = {"name": "g", "platform": "GKE", "nodeSelector": {"spot": "true"}, "tolerations": tolerations}
    changed = render(
        f"defaultPool={json.dumps(pool)}", 'watchNamespaces=["ml","research"]', "operator.nativeGangs=false"
    )
    assert read(OperatorSettings, env_of(pod_templates(changed)["operator"])) == IN_A_POD.model_copy(
        update={
            "namespaces": ("ml", "research"),
            "native_gangs": False,
            "default_pool": Pool(
                name="g",
                platform=Platform.GKE,
                node_selector={"spot": "true"},
                tolerations=tuple(tolerations),
            ),
        }
    )


def test_the_operator_reads_the_job_defaults_of_the_chart() -> None:
    pools = [{"name": "a100", "platform": "Karpenter"}]
    given = {"checkpointPrefix": "s3://team/runs", "credentialsSecret": "s3", "pools": ["a100"]}
    changed = render(f"pools={json.dumps(pools)}", f"jobDefaults={json.dumps(given)}")
    settings = read(OperatorSettings, env_of(pod_templates(changed)["operator"]))
    assert settings.job_defaults == JobDefaults(
        checkpoint_prefix="s3://team/runs", credentials_secret="s3", pools=("a100",)
    )


def test_the_job_of_helm_test_needs_no_service_account_of_the_job_defaults() -> None:
    """They name one for the teams' namespaces."""
    job = find(render('jobDefaults.serviceAccountName="trainer"'), "TrainingJob", "spottrain-test")
    assert job["spec"]["template"]["spec"]["serviceAccountName"] == "default"


def test_null_is_the_default() -> None:
    changed = render(
        "jobDefaults=null", "pools=null", "defaultPool=null", "operator.tuning=null", "watchNamespaces=null"
    )
    assert read(OperatorSettings, env_of(pod_templates(changed)["operator"])) == IN_A_POD


def test_each_tuning_value_reaches_the_setting_of_its_name() -> None:
    tuning = {
        "logLevel": "DEBUG",
        "progressSeconds": 7.5,
        "deadSlackSeconds": 8,
        "runtimePatienceSeconds": 900,
    }
    assert SCHEMA["properties"]["operator"]["properties"]["tuning"]["properties"].keys() == tuning.keys()
    changed = render(f"operator.tuning={json.dumps(tuning)}")
    settings = read(OperatorSettings, env_of(pod_templates(changed)["operator"]))
    for name, value in tuning.items():
        assert getattr(settings, re.sub("([A-Z])", r"_\1", name).lower()) == value


def test_the_probes_ask_what_the_operator_serves(objects: list[Object]) -> None:
    (container,) = pod_templates(objects)["operator"]["spec"]["containers"]
    assert container["ports"] == [{"name": "http", "containerPort": OperatorSettings().health_port}]
    assert container["livenessProbe"]["httpGet"] == {"path": "/livez", "port": "http"}
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "http"}


# --- agent ---------------------------------------------------------------------------------------------
def test_the_agent_reads_the_environment_that_the_chart_writes() -> None:
    changed = render('watchNamespaces=["ml","research"]', 'agent.metadataEndpoint="http://127.0.0.1:1338"')
    environ = env_of(pod_templates(changed)["agent"])
    assert set(environ) == {PREFIX + name.upper() for name in AgentSettings.model_fields}
    assert read(AgentSettings, environ) == AgentSettings(
        node="from the pod",
        metadata_endpoint="http://127.0.0.1:1338",
        namespaces=("ml", "research"),
        ready_file=Path("/run/spottrain/ready"),
    )


def test_the_agent_runs_on_the_spot_nodes_of_each_platform_whatever_their_taints(
    objects: list[Object],
) -> None:
    spec = pod_templates(objects)["agent"]["spec"]
    terms = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
        "nodeSelectorTerms"
    ]
    alternatives = {(e["key"], value) for t in terms for e in t["matchExpressions"] for value in e["values"]}
    assert alternatives == CAPACITY_LABELS[CapacityType.SPOT] and len(terms) == len(alternatives)
    assert spec["tolerations"] == [{"operator": "Exists"}]
    assert spec["priorityClassName"] == "system-node-critical"


def test_the_agents_probe_looks_for_the_file_that_the_agent_makes(objects: list[Object]) -> None:
    pod = pod_templates(objects)["agent"]
    (container,), (volume,) = pod["spec"]["containers"], pod["spec"]["volumes"]
    file = read(AgentSettings, env_of(pod)).ready_file
    assert file is not None and container["readinessProbe"] == {
        "exec": {"command": ["test", "-e", str(file)]}
    }
    assert container["volumeMounts"] == [{"name": volume["name"], "mountPath": str(file.parent)}]
    assert {"livenessProbe", "ports"}.isdisjoint(container)


def test_the_agents_platform_reaches_it() -> None:
    environ = env_of(pod_templates(render('agent.platform="Azure"'))["agent"])
    assert read(AgentSettings, environ).platform == "Azure"


# --- CRD -----------------------------------------------------------------------------------------------
def test_the_rendered_crd_differs_by_the_keep_annotation_alone(objects: list[Object]) -> None:
    rendered = find(objects, "CustomResourceDefinition", "trainingjobs.spottrain.io")
    assert rendered["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
    assert rendered == yaml.safe_load(CRD.read_text())


def test_a_packaged_chart_has_the_crd_in_place_of_the_link(tmp_path: Path) -> None:
    done = helm("package", CHART, "--destination", tmp_path)
    assert done.returncode == 0, done.stderr
    (made,) = tmp_path.iterdir()
    with tarfile.open(made) as package:
        found = package.extractfile("spottrain/files/trainingjobs.yaml")
        assert found is not None and found.read() == CRD.read_bytes()


def test_the_crd_can_be_left_to_helm_or_left_out() -> None:
    assert find(render("crds.keep=false"), "CustomResourceDefinition", "trainingjobs.spottrain.io") == (
        yaml.safe_load(CRD.read_text())
    )
    assert "CustomResourceDefinition" not in [o["kind"] for o in render("crds.enabled=false")]


# --- names and hooks -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("release", "operator"), [("spottrain", "spottrain-operator"), ("prod", "prod-spottrain-operator")]
)
def test_names_begin_with_the_release(release: str, operator: str) -> None:
    assert find(render(release=release), "Deployment", operator)["metadata"]["name"] == operator


def test_two_releases_share_no_name() -> None:
    def named(release: str) -> set[tuple[str, str]]:
        return {(o["kind"], o["metadata"]["name"]) for o in render("crds.enabled=false", release=release)}

    assert not named("a") & named("b")


def test_the_uninstall_hook_runs_after_the_operators_rights_are_gone_and_leaves_nothing(
    objects: list[Object],
) -> None:
    hooks = {o["kind"]: o["metadata"]["annotations"] for o in objects if "uninstall" in o["metadata"]["name"]}
    assert set(hooks) == {"ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Job"}
    assert {a["helm.sh/hook"] for a in hooks.values()} == {"post-delete"}
    assert all("hook-succeeded" in a["helm.sh/hook-delete-policy"] for a in hooks.values())
    weights = {kind: int(a.get("helm.sh/hook-weight", "0")) for kind, a in hooks.items()}
    assert max(w for kind, w in weights.items() if kind != "Job") < weights["Job"]


def test_namespaced_objects_are_in_the_release_namespace_or_say_where(objects: list[Object]) -> None:
    assert {o["metadata"].get("namespace", NAMESPACE) for o in objects} == {NAMESPACE}


def test_the_operator_leaves_a_lost_node_as_soon_as_its_trainers_do(objects: list[Object]) -> None:
    def seconds(rendered: list[Object]) -> dict[str, int]:
        pod = find(rendered, "Deployment", "spottrain-operator")["spec"]["template"]["spec"]
        return {t["key"]: t["tolerationSeconds"] for t in pod["tolerations"] if "tolerationSeconds" in t}

    silence = {"node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"}
    assert seconds(objects) == dict.fromkeys(silence, 30)
    given = render("operator.lostNodeSeconds=5", 'operator.tolerations=[{"operator": "Exists"}]')
    assert seconds(given) == dict.fromkeys(silence, 5)
    pod = find(given, "Deployment", "spottrain-operator")["spec"]["template"]["spec"]
    assert {"operator": "Exists"} in pod["tolerations"], "a person's own come as well"


def test_the_dashboard_is_one_that_grafanas_sidecar_finds() -> None:
    board = find(render("metrics.dashboard.enabled=true"), "ConfigMap", "spottrain-dashboard")
    assert board["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(board["data"]["spottrain.json"])["uid"] == "spottrain"
