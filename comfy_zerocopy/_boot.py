# What a worker's Python runs first, as text behind -c: it makes the lent package importable and hands over to it.
#
# argv: the lent folder, then what worker.main takes. Any Python, however old, must be able to parse this file: it is what
# tells an unfit one so. Exit status 78 (EX_CONFIG) with one line on stderr: the environment cannot run a worker at all.
import sys


def _unfit(why):
    sys.stderr.write("comfy_zerocopy: %s\n" % why)
    sys.stderr.flush()
    sys.exit(78)


def _start(folder, arguments):
    if sys.version_info < (3, 10):
        _unfit("this worker's Python is %d.%d (%s); workers need 3.11 or newer, or 3.10 with the package "
               "installed there" % (sys.version_info[0], sys.version_info[1], sys.executable))
    lent, why = True, ""
    sys.path.insert(0, folder)
    while True:
        try:
            from comfy_zerocopy import _native

            verdict = _native.verdict()
            if verdict.ok:
                break
            why = why or verdict.why
        except ImportError as error:
            why = why or str(error)
        if not lent:
            _unfit(
                "the parent's extension does not fit this worker's Python %d.%d (%s), and the environment has no comfy_zerocopy of its "
                "own that does: install it there from its source: '%s -m pip install ./comfy-zerocopy'. (%s)" % (sys.version_info[0], sys.version_info[1], sys.executable, sys.executable, why)
            )
        # The lent one does not fit: an installed one may. The handshake compares the versions.
        lent = False
        sys.path.remove(folder)
        for name in [n for n in sys.modules if n.partition(".")[0] == "comfy_zerocopy"]:
            del sys.modules[name]
    from comfy_zerocopy import worker

    worker.main(arguments)


_start(sys.argv[1], sys.argv[2:])
