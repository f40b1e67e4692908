"""How often a processor looks for cycles among its objects: seldom, because nearly all go when the last name does.

Python counts references; its collector only finds what is left over in cycles. By its defaults it looks at a fold's
open groups many times before they close, and now and then at every object of every library that is imported.
"""

import gc

NEW_OBJECTS = 50_000
"""So many more objects than before make it look at the new ones: some milliseconds, every few hundred groups."""


def collect_seldom() -> None:
    """Spare for good what start-up has made, and look at the rest seldom; call it once, at a process's start."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS, 10, 10)
