"""What each of two processes does for test_processes.py: all of it in one start of torchrun.

python two_processes.py COMMANDS, in JSON {name: [script, arguments...]}; in the working folder
NAME-RANK.txt then holds what the process said, and NAME-RANK.ended is there if all went well.
The last command is `endless`, a training that test_processes.py ends.
"""

import contextlib
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from unittest.mock import patch

import torch

from lab import shell
import compcos
from lab import reproduce
import train

MAIN = {"compcos.py": compcos.main, "reproduce.py": reproduce.main}
RANK = shell.rank()
EPOCH_STEPS = 4


def do(name, function, *arguments):
    """Call a function; what it says goes to NAME-RANK.txt. A command may end in an exit status; any
    other error is noted there, and NAME-RANK.ended is missing."""
    with open(f"{name}-{RANK}.txt", "w") as said:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            try:
                function(*arguments)
            except SystemExit as end:
                print(f"exit status {end.code}", file=said)
            except BaseException:
                traceback.print_exc(file=said)
                return
    Path(f"{name}-{RANK}.ended").touch()


def spread():
    """Each item is worked on once, by a process that is then alone; both get all, in order."""
    done = list(shell.distribute(range(5), lambda item: (item, RANK, shell.processes())))
    assert done == [(item, (item, item % 2, 1)) for item in range(5)], done


def unshared():
    """A folder that only the first process sees is named."""
    shell.check_shared("shared")
    os.mkdir(f"of-{RANK}")
    with contextlib.chdir(f"of-{RANK}"):
        try:
            shell.check_shared("results")
        except OSError as error:
            assert str(error).startswith("results: process 1 of 2 does not see what process 0")
        else:
            raise AssertionError("both see it")


def wrong(arguments):
    """Both find it, and the first one fails; here a signal comes to the second one meanwhile, as
    torchrun's does."""
    with patch("time.sleep", lambda seconds: signal.raise_signal(signal.SIGTERM)):
        compcos.main(arguments)


if __name__ == "__main__":
    torch.set_num_threads(1)
    compcos.FOLDER["min_epoch_steps"] = EPOCH_STEPS
    train.SAVE_SECONDS = 0.2
    do("spread", spread)
    do("unshared", unshared)
    commands = json.loads(sys.argv[1])
    _, *endless = commands.pop("endless")
    for name, (script, *arguments) in commands.items():
        do(name, wrong if name == "wrong" else MAIN[script], arguments)
    compcos.main(endless)
