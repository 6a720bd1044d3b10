"""The report of a run: as data, on the terminal, and as one HTML page.

data      a report's contents, made from an account, and several side by side; the source of all the rest
figures   which figures there are and how they are written
text      for the terminal
html      for the browser: panels.py with plots.py, and time_plots.py for those over time

Of a statement: spending.py for a terminal and for tools, spending_page.py for the browser, focus.py for finance tools.
"""
