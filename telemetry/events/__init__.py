"""Files of a run: event files, which TensorBoard shows, and the run log, which telemetry reads."""
