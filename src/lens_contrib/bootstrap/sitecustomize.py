"""Found first on ``PYTHONPATH``: makes this process one whose torch is traced, and steps aside.

Python looks for one module of this name; the one that this hides, of the user or the system, runs
after it as if it were found first.
"""

import os
import sys


def _trace() -> None:
    try:
        from lens_contrib.bootstrap import trace_torch  # noqa: PLC0415 - see the exception
    except ImportError:
        return  # the Python of another environment; lens run says that nothing was traced
    trace_torch()


def _run_hidden() -> None:
    from _frozen_importlib import module_from_spec  # noqa: PLC0415
    from _frozen_importlib_external import PathFinder  # noqa: PLC0415 - without importlib's 60 ms

    here = os.path.dirname(os.path.abspath(__file__))
    rest = [entry for entry in sys.path if os.path.abspath(entry or ".") != here]
    spec = PathFinder.find_spec("sitecustomize", rest)
    if spec is None or spec.loader is None:
        return
    module = module_from_spec(spec)
    ours = sys.modules.get("sitecustomize")
    sys.modules["sitecustomize"] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        if ours is not None:
            sys.modules["sitecustomize"] = ours
        raise  # Python says what it says without us


try:
    _trace()
except Exception as error:  # noqa: BLE001 - no program fails to start because of us
    sys.stderr.write(f"lens: not traced: {error!r}\n")
_run_hidden()
