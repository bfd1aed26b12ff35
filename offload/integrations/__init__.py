"""Faces that other tools' scripts know: DeepSpeed's ``initialize`` and the schedules of its configuration."""
