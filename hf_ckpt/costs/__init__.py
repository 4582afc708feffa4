"""What a training step costs: bytes and seconds of any plan, from a measured step and what each action changes in it.

Pure: imports neither torch nor any room that measures. `steps` has the measured steps, `costs` what each call costs
under every action, and the memory of a plan moment by moment.
"""
