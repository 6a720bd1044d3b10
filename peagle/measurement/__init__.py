"""What every measurement in a real engine shares: its keys, prompts, engine, closed loop, folder and plots."""
