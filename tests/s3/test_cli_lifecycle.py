"""`spottrain checkpoints lifecycle`, and archived checkpoints.

versitygw, the S3 server of the other tests here, has neither lifecycle rules nor storage classes, so these
run against moto, an imitation of AWS inside this process. What moto does not do is move objects: an archived
one is written as such.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from moto import mock_aws
from spottrain.checkpoint.head.owner import ClaimPolicy, HeadOwner, Identity
from spottrain.contract import OnExisting
from spottrain.storage.s3 import S3Store

from tests.support import s3server
from tests.support.command import checkpoints as main
from tests.support.headcheckpoints import Made, save

BUCKET = "models"
URI = f"s3://{BUCKET}/team/run"
OTHERS: dict[str, Any] = {
    "ID": "somebody's",
    "Status": "Enabled",
    "Filter": {"Prefix": "logs/"},
    "Expiration": {"Days": 30},
}


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name, value in s3server.credentials().items():
        monkeypatch.setenv(name, value)
    # moto reads no bytearray, which is what the store sends small bodies as.
    monkeypatch.setattr("spottrain.storage.s3.bytearray", bytes, raising=False)
    with mock_aws():
        it = boto3.client("s3", region_name="us-east-1")
        it.create_bucket(Bucket=BUCKET)
        yield it


@pytest.fixture
def store(client: Any) -> S3Store:
    return S3Store(BUCKET, "team/run")


def owner(store: S3Store, uid: str = "A") -> HeadOwner:
    who = Identity(job_uid=uid, job=f"job-{uid}", attempt=1)
    it = HeadOwner(store, who, ClaimPolicy(on_existing=OnExisting.FRESH))
    it.claim()
    return it


def ended(store: S3Store, uid: str = "A") -> tuple[str, list[str]]:
    """A run that left steps 5 (best) and 7, and an orphan. Key of the orphan, keys of the checkpoints."""
    it = owner(store, uid)
    kept = [save(store, it, 5, best=True).key, save(store, it, 7).key]
    orphan = f"{it.new_key(9)}r00000-00.safetensors"
    store.put(orphan, b"half")
    it.release(done=True)
    return orphan, kept


def tags(client: Any, key: str) -> dict[str, str]:
    reply = client.get_object_tagging(Bucket=BUCKET, Key=f"team/run/{key}")
    return {each["Key"]: each["Value"] for each in reply["TagSet"]}


def rules(client: Any) -> list[dict[str, Any]]:
    return list(client.get_bucket_lifecycle_configuration(Bucket=BUCKET)["Rules"])


def ran(capsys: pytest.CaptureFixture[str], *words: str, command: str = "lifecycle") -> tuple[int, Any]:
    code = main([command, URI, *words, "-o", "json"])
    said = capsys.readouterr()
    return code, json.loads(said.out) if said.out else said.err


# --- the rule ---------------------------------------------------------------------------------------
def test_without_apply_the_rule_is_shown_and_nothing_changes(
    client: Any, store: S3Store, capsys: pytest.CaptureFixture[str]
) -> None:
    orphan, _ = ended(store)
    code, facts = ran(capsys, "--days", "3", "--storage-class", "DEEP_ARCHIVE")
    assert code == 0
    assert facts["rule"]["Transitions"] == [{"Days": 3, "StorageClass": "DEEP_ARCHIVE"}]
    assert facts["rule"]["Filter"]["And"] == {
        "Prefix": "team/run/checkpoints/",
        "Tags": [{"Key": "spottrain", "Value": "cold"}],
    }
    assert (facts["cold"], facts["applied"]) == ([orphan], False)
    assert tags(client, orphan) == {}
    with pytest.raises(client.exceptions.ClientError, match="NoSuchLifecycleConfiguration"):
        rules(client)


def test_apply_sets_the_rule_beside_others_and_again_replaces_only_its_own(
    client: Any, store: S3Store, capsys: pytest.CaptureFixture[str]
) -> None:
    ended(store)
    client.put_bucket_lifecycle_configuration(Bucket=BUCKET, LifecycleConfiguration={"Rules": [OTHERS]})
    before = rules(client)
    assert ran(capsys, "--apply")[1]["otherRules"] == 1
    code, facts = ran(capsys, "--apply", "--days", "9")
    assert code == 0
    after = rules(client)
    assert after == [*before, facts["rule"]]
    assert after[1]["Transitions"] == [{"Days": 9, "StorageClass": "GLACIER"}]


def test_two_runs_of_one_bucket_have_a_rule_each(
    client: Any, store: S3Store, capsys: pytest.CaptureFixture[str]
) -> None:
    ended(store)
    ran(capsys, "--apply")
    main(["lifecycle", f"s3://{BUCKET}/team/run2", "--apply"])
    assert len({rule["ID"] for rule in rules(client)}) == 2


def test_rules_of_the_old_form_are_left_alone_with_a_sentence(
    client: Any, store: S3Store, capsys: pytest.CaptureFixture[str]
) -> None:
    ended(store)
    old = {"ID": "old", "Status": "Enabled", "Prefix": "logs/", "Expiration": {"Days": 30}}
    client.put_bucket_lifecycle_configuration(Bucket=BUCKET, LifecycleConfiguration={"Rules": [old]})
    before = rules(client)
    if "Prefix" not in before[0]:
        pytest.fail("moto no longer keeps the old form; this test needs another server")
    code, said = ran(capsys, "--apply")
    assert code == 2 and "old form, without Filter (old)" in said
    assert rules(client) == before


def test_a_change_of_the_rules_by_somebody_else_at_the_same_time_is_noticed(
    client: Any, store: S3Store, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from spottrain.storage.s3_lifecycle import Rules, S3Lifecycle

    ended(store)
    read = S3Lifecycle.rules
    answers = iter([None, Rules(rules=(OTHERS,))])
    monkeypatch.setattr(S3Lifecycle, "rules", lambda self: next(answers) or read(self))
    code, said = ran(capsys, "--apply")
    assert code == 2 and "differ from what was written" in said


# --- the tag ----------------------------------------------------------------------------------------
def test_the_tag_is_on_orphans_alone_and_never_on_what_head_names(
    client: Any, store: S3Store, capsys: pytest.CaptureFixture[str]
) -> None:
    orphan, kept = ended(store)
    wrong = f"{kept[0]}manifest.json"
    pairs = [{"Key": "spottrain", "Value": "cold"}, {"Key": "team", "Value": "red"}]
    for key in (wrong, orphan):
        client.put_object_tagging(
            Bucket=BUCKET, Key=f"team/run/{key}", Tagging={"TagSet": pairs[1:] if key == orphan else pairs}
        )
    _, facts = ran(capsys, "--apply")
    assert (facts["tagged"], facts["untagged"]) == (1, 1)
    assert tags(client, orphan) == {"spottrain": "cold", "team": "red"}
    assert tags(client, wrong) == {"team": "red"}
    named = [key for key in store.list("") if key not in (orphan, wrong)]
    assert all(tags(client, key) == {} for key in named)
    _, again = ran(capsys, "--apply")
    assert (again["tagged"], again["untagged"]) == (0, 0)


def test_what_an_earlier_job_left_is_tagged_only_when_it_is_asked_for(
    client: Any, store: S3Store, capsys: pytest.CaptureFixture[str]
) -> None:
    orphan, earlier = ended(store)
    save(store, owner(store, "B"), 1)  # it runs
    assert ran(capsys)[1]["cold"] == [orphan]
    ran(capsys, "--earlier-jobs", "--apply")
    cold = {key for key in store.list("checkpoints/") if tags(client, key)}
    assert {key.rsplit("/", 1)[0] + "/" for key in cold - {orphan}} == set(earlier)


def test_without_head_nothing_is_cold(store: S3Store, capsys: pytest.CaptureFixture[str]) -> None:
    ended(store)
    store.delete(["HEAD"])
    assert ran(capsys)[1]["cold"] == []


def test_too_few_days_for_the_class_and_a_store_without_rules_are_said(
    store: S3Store, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    ended(store)
    code, said = ran(capsys, "--storage-class", "STANDARD_IA")
    assert code == 2 and "after 30 days or more" in said
    assert main(["lifecycle", str(tmp_path)]) == 2
    assert "is not in S3" in capsys.readouterr().err


# --- archived checkpoints ---------------------------------------------------------------------------
@pytest.fixture
def archived(client: Any, store: S3Store) -> str:
    """Key of the newest checkpoint, whose shards lie in Glacier."""
    _, kept = ended(store)
    for name, body in Made(step=7).objects().items():
        if name != "manifest.json":  # S3 moves nothing below 128 KiB
            client.put_object(
                Bucket=BUCKET, Key=f"team/run/{kept[1]}{name}", Body=body, StorageClass="GLACIER"
            )
    return kept[1]


def test_an_archived_checkpoint_is_marked_in_the_list(
    client: Any, archived: str, capsys: pytest.CaptureFixture[str]
) -> None:
    conditions = [each["condition"] for each in ran(capsys, command="list")[1]["checkpoints"]]
    assert conditions == ["archived", ""]
    found = ran(capsys, command="verify")[1]["checkpoints"]
    assert [each["condition"] for each in found] == ["ARCHIVED", "ok"]


@pytest.mark.parametrize(
    "words", [("verify",), ("copy", "--to", "{tmp}/copy"), ("download", "--to", "{tmp}/m")]
)
def test_an_archived_checkpoint_says_how_to_restore_it(
    archived: str, tmp_path: Any, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    command, *rest = (word.format(tmp=tmp_path) for word in words)
    assert main([command, URI, *rest]) == 1
    said = capsys.readouterr()
    assert "restore-object" in said.out + said.err
    assert not (tmp_path / "m").exists()
    assert not list((tmp_path / "copy").glob("checkpoints/*"))
