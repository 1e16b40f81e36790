"""What the chart allows is what the code calls, and no more."""

from __future__ import annotations

import json
from typing import Any

import pytest
from spottrain_operator import names
from spottrain_operator.api import kueue
from spottrain_operator.api.native_gangs import API_VERSION, POD_GROUPS
from spottrain_operator.io.cluster import APPLY, Cluster, Json, release_pod, set_finalizer
from spottrain_operator.uninstall import uninstall

from tests.support.helm import ROOT, Object, find, render

RIGHTS_PAGE = ROOT / "docs" / "reference" / "rights.md"

Rights = set[tuple[str, str]]
"""(resource, verb); the resource with its API group, as kubectl writes it: deployments.apps"""

JOBS = f"{names.PLURAL}.{names.GROUP}"
AGENT: Rights = {("pods", "list"), ("pods", "patch"), ("nodes", "get"), ("nodes", "patch")}
"""The four calls of agent/api.py."""
UNINSTALL: Rights = {
    ("pods", "list"),
    ("pods", "patch"),
    (JOBS, "get"),
    (JOBS, "list"),
    (JOBS, "patch"),
    ("deployments.apps", "list"),
}
FOLLOWED = (JOBS, "pods", "nodes", "workloads.kueue.x-k8s.io")
WATCHED: Rights = {(r, v) for r in FOLLOWED for v in ("list", "watch")}
"""kopf's on.event handler of the jobs, and control/informer.py."""
LEADING: Rights = {("leases.coordination.k8s.io", verb) for verb in ("get", "create", "update")}
"""control/leader.py."""
OWNING: Rights = {(f"{JOBS}/finalizers", "update")}
"""What the admission plugin OwnerReferencesPermissionEnforcement wants for blockOwnerDeletion."""
APPLYING: Rights = {("configmaps", "create")}
"""What a server-side apply needs that creates."""


def qualified(group: str, resource: str) -> str:
    """With the API group: pods, deployments.apps, trainingjobs.spottrain.io/status."""
    plural, _, subresource = resource.partition("/")
    return ".".join(filter(None, [plural, group])) + (f"/{subresource}" if subresource else "")


class Recorder(Cluster):
    """Writes down which right each request needs, and sends none."""

    def __init__(self) -> None:  # no connection, so nothing of the base class's own
        self.needed: Rights = set()

    async def _call(self, verb: str, path: str, **_: Any) -> Json:
        core = path.startswith("/api/")
        parts = path.split("/")[3 if core else 4 :]
        if not parts:
            return {}  # discovery: every account may
        group = "" if core else path.split("/")[2]
        within = parts[2:] if parts[0] == "namespaces" else []
        resource, name, *subresource = [*(within or parts), "", ""][:3]
        right = {
            "GET": "get" if name else "list",
            "POST": "create",
            "PUT": "update",
            "PATCH": "patch",
            "DELETE": "delete",
        }[verb]
        self.needed.add(("/".join([qualified(group, resource), *filter(None, subresource)]), right))
        return {"items": [], "metadata": {"resourceVersion": "1"}}


async def called_by_the_operator() -> Rights:
    recorder = Recorder()
    here: Json = {"metadata": {"namespace": "ml"}}
    for kind in ("nodes", "namespaces", kueue.FLAVORS, kueue.QUEUE_CLASSES):
        await recorder.get(kind, "n")
    await recorder.get(kueue.POD_CLASSES, "n")
    for kind in (names.PLURAL, "pods", names.CLAIMS, "configmaps", kueue.WORKLOADS):
        await recorder.get(kind, "n", "ml")
    for kind in ("pods", "events"):
        await recorder.list(kind, "ml")
    for kind in ("pods", "services", "events", f"{API_VERSION}/{POD_GROUPS}", kueue.WORKLOADS):
        await recorder.create(kind, here)
    await recorder.create("configmaps", here)  # an apply may create it
    await recorder.patch("configmaps", "n", "ml", {}, form=APPLY)
    for kind in ("pods", names.PLURAL):
        await recorder.patch(kind, "n", "ml", {}, uid="u")
    for kind in (names.PLURAL, kueue.WORKLOADS):
        await recorder.patch(kind, "n", "ml", {}, uid="u", subresource="status")
    for kind in ("pods", names.PLURAL, kueue.WORKLOADS):
        await recorder.delete(kind, "n", "ml", uid="u")
    await recorder.served("g/v1")
    for kind in (names.PLURAL, "pods", kueue.WORKLOADS):
        assert [page.items async for page in recorder.pages(kind, "ml")] == [[]]
    for kind in ("nodes", names.NODE_POOLS):
        assert [page.items async for page in recorder.pages(kind, "")] == [[]]
    return recorder.needed


@pytest.fixture(scope="module")
def objects() -> list[Object]:
    return render()


@pytest.fixture(scope="module")
def queued() -> list[Object]:
    return render("kueue.enabled=true")


@pytest.fixture(scope="module")
def narrowed() -> list[Object]:
    return render('watchNamespaces=["ml","research"]')


def rights(role: Object) -> Rights:
    return {
        (qualified(group, resource), verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def rights_of(objects: list[Object], account: str) -> Rights:
    """Everything that a service account may do somewhere."""
    result: Rights = set()
    for binding in (o for o in objects if o["kind"].endswith("RoleBinding")):
        if account in [s["name"] for s in binding["subjects"]]:
            kind, name = binding["roleRef"]["kind"], binding["roleRef"]["name"]
            roles = [o for o in objects if o["kind"] == kind and o["metadata"]["name"] == name]
            assert roles, f"{binding['metadata']['name']} binds a role that is not there"
            result |= set().union(*(rights(role) for role in roles))
    return result


async def test_the_operator_may_do_what_it_calls(objects: list[Object], queued: list[Object]) -> None:
    needed = await called_by_the_operator() | WATCHED | OWNING | APPLYING | LEADING
    assert rights_of(queued, "spottrain-operator") == needed
    queues = {(r, v) for r, v in needed if ".kueue." in r or r.startswith("priorityclasses.")}
    assert rights_of(objects, "spottrain-operator") == needed - queues, "nothing of Kueue's by default"


def test_kubernetes_own_groups_are_made_only_where_that_is_not_switched_off(objects: list[Object]) -> None:
    own = {("podgroups.scheduling.k8s.io", "create")}
    without = rights_of(render("operator.nativeGangs=false"), "spottrain-operator")
    assert rights_of(objects, "spottrain-operator") - without == own


def test_what_the_operator_makes_changes_and_deletes_is_held_by_its_policies(queued: list[Object]) -> None:
    """All but Events, its Lease, and the status, for which nothing but the status can be changed."""
    verbs = {"CREATE": {"create"}, "UPDATE": {"update", "patch"}, "DELETE": {"delete"}}
    held = {
        (qualified(group, resource), verb)
        for policy in (o for o in queued if o["kind"] == "ValidatingAdmissionPolicy")
        if policy["metadata"]["name"].startswith("spottrain-operator-")
        for rule in policy["spec"]["matchConstraints"]["resourceRules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for operation in rule["operations"]
        for verb in verbs[operation]
    }
    free = {"events", "leases.coordination.k8s.io", f"{JOBS}/status", f"{JOBS}/finalizers"}
    writes = set().union(*verbs.values())
    granted = {(r, v) for r, v in rights_of(queued, "spottrain-operator") if v in writes and r not in free}
    assert granted <= held
    assert not [
        o for o in render("operator.admissionPolicy=false") if "operator-creates" in o["metadata"]["name"]
    ]


def test_the_clusters_own_roles_reach_training_jobs(objects: list[Object]) -> None:
    to = "rbac.authorization.k8s.io/aggregate-to-"
    view, edit = (find(objects, "ClusterRole", f"spottrain-{role}") for role in ("view", "edit"))
    assert rights(view) == {(JOBS, verb) for verb in ("get", "list", "watch")}
    assert rights(edit) == {(JOBS, verb) for verb in ("create", "update", "patch", "delete")}
    labels = [{k for k in role["metadata"]["labels"] if k.startswith(to)} for role in (view, edit)]
    assert labels == [{f"{to}{r}" for r in roles} for roles in (("view", "edit", "admin"), ("edit", "admin"))]
    assert "spottrain-edit" not in [o["metadata"]["name"] for o in render("aggregateRoles=false")]


def test_the_agent_may_do_what_it_calls(objects: list[Object]) -> None:
    assert rights_of(objects, "spottrain-agent") == AGENT


async def test_the_uninstall_hook_may_do_what_it_calls_and_everywhere(
    objects: list[Object], narrowed: list[Object]
) -> None:
    """Where watchNamespaces was longer once, what is held is outside of what it names now."""
    recorder = Recorder()
    await uninstall(recorder)
    await release_pod(recorder, "p", "ml", uid="u")
    await set_finalizer(recorder, "j", "ml", uid="u", on=False)
    assert recorder.needed == UNINSTALL
    for rendered in (objects, narrowed):
        assert rights_of(rendered, "spottrain-uninstall") == UNINSTALL
        kinds = {o["kind"] for o in rendered if o["metadata"]["name"] == "spottrain-uninstall"}
        assert "ClusterRole" in kinds and "Role" not in kinds


def rights_in_docs(account: str) -> Rights:
    """The rights of an account by docs/reference/rights.md: `resource verb verb; resource verb`."""
    cells = [line.split("|")[1:-1] for line in RIGHTS_PAGE.read_text().splitlines() if line.startswith("| ")]
    rules = [rule.split() for row in cells if row[0].strip() == account for rule in row[2].split(";")]
    return {(resource, verb) for resource, *verbs in rules for verb in verbs}


@pytest.mark.parametrize(
    ("named", "account"),
    [
        ("operator", "spottrain-operator"),
        ("notice agent", "spottrain-agent"),
        ("uninstall hook", "spottrain-uninstall"),
        ("test pod", "spottrain-test"),
    ],
)
def test_the_page_on_rights_names_each_right_that_the_chart_grants(
    objects: list[Object], named: str, account: str
) -> None:
    assert rights_in_docs(named) == rights_of(objects, account)


def test_the_page_on_rights_names_what_comes_with_kueue(objects: list[Object], queued: list[Object]) -> None:
    more = rights_of(queued, "spottrain-operator") - rights_of(objects, "spottrain-operator")
    assert rights_in_docs("operator, with Kueue") == more
    assert rights_in_docs("Kueue") == rights_of(queued, "kueue-controller-manager")


def test_kueues_own_account_may_look_up_the_owner_of_a_pod(objects: list[Object]) -> None:
    """Its webhook reads TrainingJobs by a cache of all of them, and refuses a pod where it cannot."""
    queued = render("kueue.enabled=true", 'kueue.serviceAccount="queues"', 'kueue.namespace="batch"')
    assert rights_of(queued, "queues") == {(JOBS, verb) for verb in ("get", "list", "watch")}
    binding = find(queued, "ClusterRoleBinding", "spottrain-kueue")
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "queues", "namespace": "batch"}]
    assert not rights_of(objects, "kueue-controller-manager"), "nothing without Kueue"


def test_nobody_reads_secrets_runs_commands_in_pods_or_has_a_wildcard(objects: list[Object]) -> None:
    roles = [o for o in objects if o["kind"] in ("Role", "ClusterRole")]
    granted = set().union(*(rights(role) for role in roles))
    assert not {resource.split(".")[0] for resource, _ in granted} & {
        "secrets",
        "pods/exec",
        "pods/ephemeralcontainers",
        "*",
    }
    assert not {verb for _, verb in granted} & {"*", "escalate", "bind", "impersonate", "deletecollection"}
    assert "*" not in [g for role in roles for rule in role["rules"] for g in rule["apiGroups"]]


@pytest.mark.parametrize("account", ["spottrain-operator", "spottrain-agent"])
def test_with_namespaces_named_only_nodes_are_reached_outside_them(
    narrowed: list[Object], account: str
) -> None:
    everywhere = [
        o for o in narrowed if o["kind"] == "ClusterRole" and o["metadata"]["name"].startswith(account)
    ]
    wide = set().union(*(rights(role) for role in everywhere))
    named = {("namespaces", "get"), (JOBS, "get"), (JOBS, "patch")}
    """To let go of the jobs of a namespace that is deleted with its RoleBinding."""
    assert {r for r, _ in wide - named} <= {"nodes", f"{names.NODE_POOLS}.karpenter.sh"}
    roles = [o for o in narrowed if o["kind"] == "Role" and o["metadata"]["name"] == account]
    assert [role["metadata"]["namespace"] for role in roles] == ["ml", "research"]


@pytest.mark.parametrize("account", ["spottrain-operator", "spottrain-agent", "spottrain-uninstall"])
def test_the_rights_are_the_same_with_namespaces_named(
    objects: list[Object], narrowed: list[Object], account: str
) -> None:
    assert rights_of(objects, account) == rights_of(narrowed, account)


@pytest.mark.parametrize("resource", ["nodes", "pods"])
def test_the_policies_speak_of_the_agents_account_and_of_the_marks_that_the_code_writes(
    objects: list[Object], resource: str
) -> None:
    policy = find(objects, "ValidatingAdmissionPolicy", f"spottrain-agent-{resource}")
    binding = find(objects, "ValidatingAdmissionPolicyBinding", f"spottrain-agent-{resource}")
    text = json.dumps(policy)
    assert "system:serviceaccount:spottrain-system:spottrain-agent" in text
    marks = (names.DEADLINE_ANNOTATION, names.SOURCE_ANNOTATION, names.NOTICE_SEEN_ANNOTATION)
    assert all(f"'{mark}'" in text for mark in (*marks, names.SAVE_ADVISED_ANNOTATION))
    assert (f"'{names.TERMINATING_TAINT}'" in text) is (resource == "nodes")
    assert policy["spec"]["failurePolicy"] == "Fail"
    assert binding["spec"] == {"policyName": policy["metadata"]["name"], "validationActions": ["Deny"]}
