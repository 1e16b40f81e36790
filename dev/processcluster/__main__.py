"""`PYTHONPATH=dev python -m processcluster ...`"""

import sys

from processcluster.cli import main

sys.exit(main(sys.argv[1:]))
