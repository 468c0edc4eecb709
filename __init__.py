"""ComfyUI loads this file where the repository lies in its custom_nodes folder; it is not part of the Python package.

Gives ComfyUI one node, which shows what `doctor` says. Loads in every world: without GPU, extension or torch too.
"""
import importlib.util
import logging
import pathlib

NODE_CLASS_MAPPINGS: dict = {}
NODE_DISPLAY_NAME_MAPPINGS: dict = {}

try:
    _pack = pathlib.Path(__file__).resolve().parent
    # By its path: the folder's name is the user's, and a relative import would make a second copy of the package.
    _spec = importlib.util.spec_from_file_location(
        "_comfy_zerocopy_prestartup", _pack / "comfy_zerocopy" / "comfyui" / "prestartup.py")
    _prestartup = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(_prestartup)
    _prestartup.choose(_pack)

    from comfy_zerocopy.comfyui.nodes import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS
except Exception as _error:
    logging.getLogger("comfy_zerocopy").warning("comfy_zerocopy: no nodes: %s: %s", type(_error).__name__, _error)

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]
