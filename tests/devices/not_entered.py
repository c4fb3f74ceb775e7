"""The functions that handle devices and run on no simulated device, with the reason for each."""

NOT_ENTERED: dict[str, str] = {}
