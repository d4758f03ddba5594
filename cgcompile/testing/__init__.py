"""Capture without a GPU: the recorder on the CPU that ``capture_device=\"host\"`` selects."""
