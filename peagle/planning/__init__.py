"""Plans: from measured speeds and prices to machines, hours and dollars."""
