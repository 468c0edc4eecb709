"""ComfyUI runs this before it imports torch, where the repository lies in its custom_nodes folder.

Puts into force what the user opted into (COMFY_ZEROCOPY, or comfy_zerocopy.json in ComfyUI's user directory) by arming a
hook. Touches no CUDA, imports no torch, never raises.
"""


def _start() -> None:
    import importlib.util
    import logging
    import pathlib

    try:
        pack = pathlib.Path(__file__).resolve().parent
        # By its path: which copy of the package will be `comfy_zerocopy` is what this file decides.
        spec = importlib.util.spec_from_file_location(
            "_comfy_zerocopy_prestartup", pack / "comfy_zerocopy" / "comfyui" / "prestartup.py")
        prestartup = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(prestartup)
        prestartup.choose(pack)

        from comfy_zerocopy.comfyui import prestartup as chosen

        chosen.arm()
    except Exception as error:
        logging.getLogger("comfy_zerocopy").warning("comfy_zerocopy: off: %s: %s", type(error).__name__, error)


_start()
