"""Read by Python when a scene's uploader starts, because the script puts this folder on its path.

The uploader is a process of its own, and here it learns to tell when it uploads.
"""

import os
import sys

if "CHAOS" in os.environ and "spottrain.checkpoint.upload" in sys.orig_argv:
    from spottrain.storage.local import FolderStore

    from tests.chaos.order import Order, Teller, tell_of_uploads

    teller = Teller(Order.from_env(os.environ), int(os.environ.get("RANK", "0")))
    tell_of_uploads(FolderStore, teller)
