"""One compiled graph at run time: dispatch, capture, guards, replay. Start at ``compiled_graph``."""
