from jobs.api import Run as Run
from jobs.api import cost as cost
from jobs.api import generate as generate
from jobs.api import serve as serve

__version__: str
