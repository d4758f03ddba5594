"""What tests set in Dynamo."""

import sys

import torch


def dynamo_may_free_dicts() -> None:
    """Turn off a form of guards of torch 2.11 that crashes a process.

    With Python 3.12 it watches dicts, and its callback uses guards that were freed before: a
    segmentation fault while garbage is collected. Later versions of torch leave it off.
    """
    if torch.__version__ < "2.12" and sys.version_info >= (3, 12):
        torch._dynamo.config.use_recursive_dict_tags_for_guards = False
