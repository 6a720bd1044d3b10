"""The report of a run and the statement of a period, each as data, text and HTML; statements also as CSV."""
