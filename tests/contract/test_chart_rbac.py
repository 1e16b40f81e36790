"""What the chart allows is what the code calls, and no more."""

from __future__ import annotations

import json
from typing import Any

import pytest
from spottrain_operator import names
from spottrain_operator.io.cluster import Cluster, Json, KubeCluster
from spottrain_operator.uninstall import uninstall

from tests.support.helm import ROOT, Object, find, render

SECURITY = ROOT / "docs" / "security.md"

Rights = set[tuple[str, str]]
"""(resource, verb)"""

AGENT: Rights = {("pods", "list"), ("pods", "patch"), ("nodes", "get"), ("nodes", "patch")}
"""The four calls of agent/api.py."""
UNINSTALL: Rights = {
    ("pods", "list"),
    ("pods", "patch"),
    (names.PLURAL, "get"),
    (names.PLURAL, "list"),
    (names.PLURAL, "patch"),
    ("deployments", "list"),
}
WATCHED: Rights = {(r, v) for r in (names.PLURAL, "pods", "nodes") for v in ("list", "watch")}
"""kopf's on.event handlers."""
OWNING: Rights = {(f"{names.PLURAL}/finalizers", "update")}
"""What the admission plugin OwnerReferencesPermissionEnforcement wants for blockOwnerDeletion."""


class Recorder(KubeCluster):
    """Writes down which right each request needs, and sends none."""

    def __init__(self) -> None:  # no connection, so nothing of the base class's own
        self.needed: Rights = set()

    async def _call(self, verb: str, path: str, **_: Any) -> Json:
        parts = path.split("/")[3 if path.startswith("/api/") else 4 :]
        if not parts:
            return {}  # discovery: every account may
        resource, name, *subresource = [*(parts[2:] if parts[0] == "namespaces" else parts), "", ""][:3]
        right = {"GET": "get" if name else "list", "POST": "create", "PATCH": "patch", "DELETE": "delete"}[
            verb
        ]
        self.needed.add(("/".join([resource, *filter(None, subresource)]), right))
        return {"items": [], "metadata": {"resourceVersion": "1"}}


async def called_by_the_operator() -> Rights:
    recorder = Recorder()
    calls = {
        "get_job": recorder.get_job("ml", "j"),
        "get_node": recorder.get_node("n"),
        "get_pod": recorder.get_pod("ml", "p"),
        "get_claim": recorder.get_claim("ml", "c"),
        "pod_events": recorder.pod_events("ml", "u"),
        "list_pods": recorder.list_pods("ml", "a=b"),
        "create_pod": recorder.create_pod({"metadata": {"namespace": "ml"}}),
        "delete_pod": recorder.delete_pod("ml", "p", uid="u", grace=None),
        "annotate_pod": recorder.annotate_pod("ml", "p", uid="u", annotations={}),
        "release_pod": recorder.release_pod("ml", "p", uid="u"),
        "apply_status": recorder.apply_status("ml", "j", uid="u", resource_version=1, status={}),
        "create": recorder.create("services", {"metadata": {"namespace": "ml"}}),
        "hold_job": recorder.hold_job("ml", "j", uid="u", on=True),
        "delete_job": recorder.delete_job("ml", "j", uid="u"),
        "create_event": recorder.create_event("ml", {}),
        "served": recorder.served("g"),
    }
    for call in calls.values():
        await call
    await recorder.create(names.CLAIMS, {"metadata": {"namespace": "ml"}})
    for group in ("workloads", "podgroups"):
        await recorder.create(group, {"metadata": {"namespace": "ml"}}, group="g/v1")
    await recorder.served("g/v1")
    for kind in (names.PLURAL, "pods", "nodes"):
        assert [item async for item in recorder.every(kind, ("ml",))] == []
    assert [item async for item in recorder.every(names.NODE_POOLS, ())] == []
    methods = {name for name in vars(Cluster) if not name.startswith("_")}
    assert methods == calls.keys() | {"every"}, "a call was added to cluster.py: name it here"
    return recorder.needed


@pytest.fixture(scope="module")
def objects() -> list[Object]:
    return render()


@pytest.fixture(scope="module")
def narrowed() -> list[Object]:
    return render('watchNamespaces=["ml","research"]')


def rights(role: Object) -> Rights:
    return {(r, v) for rule in role["rules"] for r in rule["resources"] for v in rule["verbs"]}


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


async def test_the_operator_may_do_what_it_calls(objects: list[Object]) -> None:
    assert rights_of(objects, "spottrain-operator") == await called_by_the_operator() | WATCHED | OWNING


def api_groups(objects: list[Object], resource: str) -> set[str]:
    rules = [r for o in objects if o["kind"] in ("Role", "ClusterRole") for r in o["rules"]]
    return {g for rule in rules if resource in rule["resources"] for g in rule["apiGroups"]}


def test_kubernetes_own_groups_are_made_only_where_that_is_not_switched_off(objects: list[Object]) -> None:
    assert api_groups(objects, "podgroups") == {"scheduling.volcano.sh", "scheduling.k8s.io"}
    without = render("operator.nativeGangs=false")
    assert api_groups(without, "podgroups") == {"scheduling.volcano.sh"}
    assert not api_groups(without, "workloads")


def test_the_agent_may_do_what_it_calls(objects: list[Object]) -> None:
    assert rights_of(objects, "spottrain-agent") == AGENT


async def test_the_uninstall_hook_may_do_what_it_calls_and_everywhere(
    objects: list[Object], narrowed: list[Object]
) -> None:
    """Where watchNamespaces was longer once, what is held is outside of what it names now."""
    recorder = Recorder()
    await uninstall(recorder)
    await recorder.release_pod("ml", "p", uid="u")
    await recorder.hold_job("ml", "j", uid="u", on=False)
    assert recorder.needed == UNINSTALL
    for rendered in (objects, narrowed):
        assert rights_of(rendered, "spottrain-uninstall") == UNINSTALL
        kinds = {o["kind"] for o in rendered if o["metadata"]["name"] == "spottrain-uninstall"}
        assert "ClusterRole" in kinds and "Role" not in kinds


def rights_in_docs(account: str) -> Rights:
    """The rights of an account by the table of docs/security.md: `resource verb verb; resource verb`."""
    cells = [line.split("|")[1:-1] for line in SECURITY.read_text().splitlines() if line.startswith("| ")]
    rules = [rule.split() for row in cells if row[0].strip() == account for rule in row[2].split(";")]
    return {(resource, verb) for resource, *verbs in rules for verb in verbs}


@pytest.mark.parametrize(
    ("named", "account"),
    [
        ("operator", "spottrain-operator"),
        ("notice agent", "spottrain-agent"),
        ("uninstall hook", "spottrain-uninstall"),
    ],
)
def test_the_page_on_security_names_each_right_that_the_chart_grants(
    objects: list[Object], named: str, account: str
) -> None:
    assert rights_in_docs(named) == rights_of(objects, account)


def test_nobody_reads_secrets_runs_commands_in_pods_or_has_a_wildcard(objects: list[Object]) -> None:
    roles = [o for o in objects if o["kind"] in ("Role", "ClusterRole")]
    granted = set().union(*(rights(role) for role in roles))
    assert not {resource for resource, _ in granted} & {
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
    assert {r for role in everywhere for r, _ in rights(role)} <= {"nodes", names.NODE_POOLS}
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
