"""All that knows ComfyUI: its prestartup, its nodes. Nothing else of the package imports this."""
