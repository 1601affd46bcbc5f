"""For scripts written for EasyR1: `python3 -m verl.trainer.main ...` from a clone runs `seerl train ...`."""

import sys

from seerl.cli import main

if __name__ == "__main__":
    print("verl.trainer.main: this is SeeRL; running `seerl train` with the same arguments.", file=sys.stderr)
    main(["train", *sys.argv[1:]])
