"""Keras: its checkpoints are kept by checkpoint.mode Sync. Nothing here knows of spottrain.

spottrain sync ckpt --to store --when marker=training_metadata.json -- python examples/keras_fit.py ckpt

A dense network on random images, with tf.data and early stopping, in mixed precision on a GPU. The callback
ModelCheckpoint keeps the best model. BackupAndRestore goes on after the last epoch that it has stored: it is
the last of the callbacks, and writes training_metadata.json last.
"""

import os
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

FOLDER = Path(sys.argv[1])
EPOCHS = int(os.environ.get("EPOCHS", "20"))


def images(count: int, seed: int) -> tf.data.Dataset:
    """Random images. The label of each is the brightest of ten bands."""
    x = np.random.default_rng(seed).random((count, 28, 28), dtype=np.float32)
    y = x[:, :20].reshape(count, 10, 56).mean(axis=2).argmax(axis=1)
    return tf.data.Dataset.from_tensor_slices((x, keras.utils.to_categorical(y, 10)))


def main() -> None:
    keras.utils.set_random_seed(1)
    if tf.config.list_physical_devices("GPU"):  # many CPUs are slow in it
        keras.mixed_precision.set_global_policy("mixed_float16")
    model = keras.Sequential(
        [
            keras.layers.Input((28, 28)),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(10, activation="softmax", dtype="float32"),
        ]
    )
    model.compile(optimizer="adam", loss="categorical_crossentropy", metrics=["accuracy"])
    train = images(2048, seed=1).cache().shuffle(2048, seed=1).batch(32).prefetch(tf.data.AUTOTUNE)
    best = FOLDER / "best.keras"
    model.fit(
        train,
        validation_data=images(512, seed=2).batch(256),
        epochs=EPOCHS,
        verbose=2,
        callbacks=[
            keras.callbacks.EarlyStopping(monitor="val_loss", patience=5),
            keras.callbacks.ModelCheckpoint(best, monitor="val_loss", save_best_only=True),
            keras.callbacks.BackupAndRestore(FOLDER, delete_checkpoint=False),
        ],
    )
    model.save(FOLDER / "final.keras")


if __name__ == "__main__":
    main()
