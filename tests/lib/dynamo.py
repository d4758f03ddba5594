"""What tests set in Dynamo."""

import torch


def guards_of_later_torch() -> None:
    """Turn off a form of guards of torch 2.11, which later versions leave off.

    It misses cells of closures. With Python 3.12 it watches dicts, and its callback uses guards
    that were freed before: a segmentation fault while garbage is collected.
    """
    if torch.__version__ < "2.12":
        torch._dynamo.config.use_recursive_dict_tags_for_guards = False
