"""hooked_ssm."""
