"""Places where bytes can be. With a CPU as the compute device, `device` and `host` are the same memory."""
