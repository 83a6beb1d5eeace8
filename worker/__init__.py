"""The child process: owns the model. Never imports anyio, typer or the supervisor."""
