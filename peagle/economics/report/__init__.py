"""The report of a run: as data, on the terminal, and as one HTML page.

data         what a report holds, made from an account; the source of all the rest
comparison   several reports side by side
run_info     what is said about a run besides its account
figures      which figures there are and how they are written
text         for the terminal
page, plots  for the browser
"""
