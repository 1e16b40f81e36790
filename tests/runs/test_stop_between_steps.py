"""A stop that comes while a loop of one's own is between two steps: the step before is saved all the same."""

from __future__ import annotations

import pytest
from spottrain.contract import Env, ExitCode

from tests.runs.conftest import Lab
from tests.support.heavy import sample

SCRIPT = """\
import os, time
import torch, spottrain

spottrain.seed(3)
torch.use_deterministic_algorithms(True)
WHERE = os.environ.get("WHERE", "")


class Noisy(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, i):
        if WHERE == "data" and run.global_step == 8:
            work(lambda: time.sleep(0.01))
        x = torch.randn(4, generator=torch.Generator().manual_seed(i))
        return x + 0.1 * torch.randn(4), x.sum()


def work(act):
    print("working", flush=True)
    until = time.time() + 60
    while time.time() < until:
        act()


model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))
if WHERE != "step":
    model.append(torch.nn.BatchNorm1d(1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
loader = spottrain.data.loader(Noisy(), batch_size=4, shuffle=True)
generator, history, average = torch.Generator().manual_seed(5), [], spottrain.techniques.EMA(model)
run = spottrain.Run(
    model=model,
    optimizer=optimizer,
    scheduler=scheduler,
    data=loader,
    extra={"history": history, "generator": generator, "average": average},
    log_every=1,
)


def validate():
    model.eval()
    with torch.no_grad():
        model(torch.randn(8, 4))
    model.train()
    time.sleep(0.01)


for epoch in run.epochs(3):
    for x, y in loader:
        loss = torch.nn.functional.mse_loss(model(x).squeeze(-1), y)
        if WHERE == "step" and run.global_step == 8:
            work(lambda: time.sleep(0.01))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update(run.global_step + 1)
        run.step_completed(loss=loss + 0 * torch.rand(1, generator=generator))
    scheduler.step()
    history.append(epoch)
    torch.rand(3), torch.rand(3, generator=generator)
    if WHERE == "swapped" and epoch == 0:
        for mine, theirs in zip(model.parameters(), average.by_weight().values()):
            mine.data.copy_(theirs)
    if WHERE in ("validation", "swapped") and epoch == 0:
        work(validate)
print("history", history)
run.finish()
"""


@pytest.mark.parametrize("where", sample(["validation", "data", "step"], "step"))
def test_the_step_before_is_saved_and_the_next_attempt_goes_on_bit_for_bit(lab: Lab, where: str) -> None:
    of_step = {"WHERE": "step" if where == "step" else ""}
    if where == "step":
        script = SCRIPT.replace('if WHERE == "step" and', 'if os.environ.get("NOW") and')
        plain, now = lab.run(script, at="plain", attempt=1, env=of_step).done(), of_step | {"NOW": "1"}
    else:
        script, now = SCRIPT, {"WHERE": where}
        plain = lab.run(script, at="plain", attempt=1, interval="1h").done()
    first = lab.run(script, attempt=1, interval="1h", env=now).until("working").send()
    first.ends(ExitCode.INTERRUPTED, 40)
    assert first.message.step == first.message.durableStep == 8
    second = lab.run(script, attempt=2, interval="1h", env=of_step).done()
    assert first.losses | second.losses == plain.losses
    assert second.digest == plain.digest
    assert "history [0, 1, 2]" in second.log


def test_what_the_script_has_changed_meanwhile_is_never_saved_as_the_step_before(lab: Lab) -> None:
    env = {"WHERE": "swapped", Env.GRACE_SECONDS: "3"}
    run = lab.run(SCRIPT, interval="1h", env=env).until("working").send()
    run.ends(ExitCode.INTERRUPTED_LOST, 40)
    assert "came to the end of no step in the notice" in run.message.message
    assert run.message.durableStep is None and lab.head["state"] == "active"


BREAKS = SCRIPT.replace(
    "        loss.backward()\n",
    "        if WHERE == 'breaks' and run.global_step == 8:\n"
    "            print('working', flush=True)\n"
    "            while not run.session.preemption.stopping: time.sleep(0.01)\n"
    "            raise ValueError('a worker is gone')\n"
    "        loss.backward()\n",
).replace("model.append(", "model.insert(0, torch.nn.Identity())  # ")


def test_a_script_that_a_stop_breaks_within_a_forward_pass_goes_on_bit_for_bit(lab: Lab) -> None:
    plain = lab.run(BREAKS, at="plain", attempt=1, interval="1h").done()
    first = lab.run(BREAKS, attempt=1, interval="1h", env={"WHERE": "breaks"}).until("working").send()
    first.ends(ExitCode.INTERRUPTED, 40)
    assert "a worker is gone" in first.message.message
    second = lab.run(BREAKS, attempt=2, interval="1h").done()
    assert first.losses | second.losses == plain.losses and second.digest == plain.digest
