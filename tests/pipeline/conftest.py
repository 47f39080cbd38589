from tests.figures import whole_figures as whole_figures
