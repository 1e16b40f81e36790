"""JAX with Orbax: its checkpoints are kept by checkpoint.mode Sync. Nothing here knows of spottrain.

spottrain sync ckpt --to store --when 'renamed=[0-9]*' -- python examples/jax_orbax.py ckpt

Data are a function of the step, so a run that resumes ends with the weights of one that was not interrupted.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp

FOLDER = Path(sys.argv[1]).absolute()
STEPS = int(os.environ.get("STEPS", "2000"))
SAVE_EVERY = 20
SECONDS_PER_STEP = float(os.environ.get("SECONDS_PER_STEP", "0.01"))  # a real step takes longer than this one

optimizer = optax.adamw(1e-3)


def first_state() -> Any:
    one, two = jax.random.split(jax.random.key(1))
    weights = {"in": jax.random.normal(one, (8, 64)) / 3, "out": jax.random.normal(two, (64, 1)) / 8}
    return {"weights": weights, "optimizer": optimizer.init(weights)}


def loss_of(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    guess = jax.nn.relu(x @ weights["in"]) @ weights["out"]
    return jnp.mean((guess[:, 0] - x.sum(axis=1)) ** 2)


@jax.jit  # type: ignore[untyped-decorator]
def train_step(state: Any, step: int) -> tuple[Any, jax.Array]:
    x = jax.random.normal(jax.random.fold_in(jax.random.key(2), step), (32, 8))
    loss, gradients = jax.value_and_grad(loss_of)(state["weights"], x)
    updates, inner = optimizer.update(gradients, state["optimizer"], state["weights"])
    return {"weights": optax.apply_updates(state["weights"], updates), "optimizer": inner}, loss


def main() -> None:
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    with ocp.CheckpointManager(FOLDER, options=options) as manager:
        state, done = first_state(), manager.latest_step() or 0
        if done:
            state = manager.restore(done, args=ocp.args.StandardRestore(state))
        print(f"begins at step {done}", flush=True)
        for step in range(done + 1, STEPS + 1):
            state, loss = train_step(state, step)
            time.sleep(SECONDS_PER_STEP)
            if step % SAVE_EVERY == 0 or step == STEPS:
                manager.save(step, args=ocp.args.StandardSave(state))
                print(f"step={step}/{STEPS} loss={loss:.9g}", flush=True)


if __name__ == "__main__":
    main()
