"""The Telemetry page as a plugin of TensorBoard."""
