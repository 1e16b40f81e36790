"""checkpoint.mode Sync: a script that knows nothing of us, in a foreign image, outlives its node."""

from __future__ import annotations

from localcluster.layout import OPERATOR_IMAGE

from tests.cluster.steps import Lab, Raw

STEPS = 400
SCRIPT = f"""
import os, pathlib, time

folder = pathlib.Path("/checkpoints")
saved = sorted(folder.glob("step_*"))
step = int(saved[-1].name.removeprefix("step_")) if saved else 0
print(f"begins at {{step}} resumed={{os.environ.get('SPOTTRAIN_RESUMED')}}", flush=True)
pace = 0.25 if step == 0 else 0.02
while step < {STEPS}:
    time.sleep(pace)
    step += 1
    if step % 10 == 0:
        fresh = folder / "writing"
        fresh.write_text("weights " * 10_000 + str(step))
        fresh.rename(folder / f"step_{{step:06d}}")
        for old in sorted(folder.glob("step_*"))[:-3]:
            old.unlink()
print("done", flush=True)
"""
"""As PID 1 without a handler it ignores SIGTERM."""


def job(lab: Lab) -> Raw:
    container = {"image": OPERATOR_IMAGE, "command": ["python3", "/scripts/plain.py"], "args": []}
    made = lab.job("plain", gpusPerWorker=0, container=container)
    made["spec"] |= {"training": {}}
    made["spec"]["checkpoint"] |= {
        "mode": "Sync",
        "syncPath": "/checkpoints",
        "syncWhen": {"renamed": "step_*"},
    }
    context = {"runAsNonRoot": True, "runAsUser": 65532}
    made["spec"]["template"]["spec"]["securityContext"] = context
    return made


def test_a_plain_script_goes_on_from_its_last_whole_checkpoint_on_another_node(lab: Lab) -> None:
    lab.scripts["plain.py"] = SCRIPT
    lab.apply(job(lab))

    def durable() -> bool:
        return bool(lab.status("plain").get("knownDurableStep", 0) >= 2)

    lab.wait("two commits", durable, name="plain", seconds=120)
    first = lab.node_of("plain")
    lab.cluster.reclaim(first, 40)
    status = lab.wait_for_phase("Succeeded", name="plain", seconds=180)
    attempts = status["attempts"]
    assert [a["node"] for a in attempts] == [first, next(n for n in lab.cluster.nodes if n != first)]
    assert (attempts[0]["cause"], attempts[1]["cause"]) == ("SpotNotice", "Done")
    assert (status["interruptions"], status.get("failures", 0)) == (1, 0)
    log = lab.log(lab.pods("plain")[-1]["metadata"]["name"]).splitlines()
    begun = int(log[0].split()[2])
    assert 20 <= begun < STEPS and begun % 10 == 0 and log[0].endswith("resumed=true"), log
    assert log[-1] == "done"
    assert attempts[1]["startStep"] == attempts[0]["durableStep"], "by the sidecars' own count of commits"
    assert status["knownDurableStep"] > attempts[1]["startStep"], "what the script wrote last is stored"
