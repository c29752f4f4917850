"""Static choices, made on the host: what the chips are (`chips`) and how work is dealt to their cores (`schedule`).

Pure Python: importing it loads neither torch nor Triton.
"""
