# Draws loader.svg from loader.dat in the current folder: how long a step of 20 ms waits for its batch.
# Called by run.sh.
set terminal svg noenhanced size 1000,460 font "Helvetica,13" background "white"
set output "loader.svg"
set title "Wait of a step for its batch; fetch time in % of compute x workers" font ",15"
set style data histograms
set boxwidth 0.8
set style fill solid 0.9 border -1
set grid y lc rgb "#dddddd"
set xtics rotate by 30 right font ",11"
set bmargin 9
set style histogram clustered gap 1
set ylabel "milliseconds"
set yrange [0:*]
set key top left Left reverse samplen 1
plot "loader.dat" using 2:xtic(1) title "ddp_loader" lc rgb "#0072b2", \
     "" using 3 title "PyTorch's DataLoader" lc rgb "#e69f00"
