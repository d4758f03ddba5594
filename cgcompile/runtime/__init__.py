"""One compiled graph at run time: dispatch, capture, guards, replay; see ``compiled_graph``."""
