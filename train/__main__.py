"""What `accelerate launch -m draftsmith.train` starts: see run.py."""

import sys

from draftsmith.train.run import main

if __name__ == "__main__":  # not where a spawned process imports it
    sys.exit(main())
